"""Exercise: who runs which token? Tensor-parallel ranks all hold the same T tokens; the experts need each token once.

Every rank takes a block of neighbouring tokens, the first ranks full ones of ceil(T / ranks). All blocks must have one
size, since they are gathered afterwards: the last ones are filled up with zero rows.
Legend: T tokens, H hidden.
"""

import torch
from torch import Tensor


def answer(x_TH: Tensor, rank: int, ranks: int) -> Tensor:
    """block_tH [ceil(T / ranks), H]: this rank's tokens, then zero rows.

    Worked: T = 5 on 2 ranks: rank 0 takes tokens 0 1 2, rank 1 tokens 3 4 and one zero row.
    """
    # >>> your code
    raise NotImplementedError("fill in: the block of this rank")
    # <<< your code


def check() -> None:
    """Gather the blocks and compare with all tokens: every T from 0 to 9, on 1 to 4 ranks."""
    for ranks in range(1, 5):
        for tokens in range(10):
            x_TH = torch.arange(1.0, 2 * tokens + 1).view(tokens, 2)
            blocks = [answer(x_TH, rank, ranks) for rank in range(ranks)]
            sizes = {len(block) for block in blocks}
            assert sizes == {-(-tokens // ranks)}, (
                f"T={tokens}, {ranks} ranks: blocks of {sizes} rows"
            )
            gathered_TH = torch.cat(blocks)
            assert torch.equal(gathered_TH[:tokens], x_TH), (
                f"T={tokens}, {ranks} ranks: {gathered_TH.tolist()}"
            )
            assert not gathered_TH[tokens:].any(), (
                f"T={tokens}, {ranks} ranks: rows behind the last token are not zero"
            )


if __name__ == "__main__":
    check()
    print("right")
