"""Exercise: the way home. Returned rows become the outputs of their tokens.

Rows come back in the order in which they were sent. order_S says which assignment (t * K + k) each of them carried, and
their weights are in them already. An assignment that was never sent adds nothing.
Legend: T tokens, K experts per token, S rows that were sent and came back, H hidden.
"""

import torch
from torch import Tensor


def answer(y_SH: Tensor, order_S: Tensor, tokens: int, topk: int) -> Tensor:
    """y_TH [T, H]: for every token the sum of its rows, k = 0 first: float addition depends on the order.

    Worked: T = 2, K = 2, order 2 0 1, rows 5, 1, 2: token 0 gets 1 + 2, token 1 gets 5.
    """
    # >>> your code
    raise NotImplementedError("fill in: the outputs of the tokens")
    # <<< your code


def check() -> None:
    """Three tokens, the last without any row; then one whose sum depends on the order."""
    y_SH = torch.tensor([[5.0, 50.0], [1.0, 10.0], [2.0, 20.0]])
    y_TH = answer(y_SH, torch.tensor([2, 0, 1]), 3, 2)
    wanted = [[3.0, 30.0], [5.0, 50.0], [0.0, 0.0]]
    assert y_TH.tolist() == wanted, f"{y_TH.tolist()}, wanted {wanted}"
    y_SH = torch.tensor([[1.0], [-1e8], [1e8]])  # k = 2, 1, 0: (1e8 - 1e8) + 1
    y_TH = answer(y_SH, torch.tensor([2, 1, 0]), 1, 3)
    assert y_TH.tolist() == [[1.0]], f"{y_TH.tolist()}, wanted [[1.0]]: add k = 0 first"


if __name__ == "__main__":
    check()
    print("right")
