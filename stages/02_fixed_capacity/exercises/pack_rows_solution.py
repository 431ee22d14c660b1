"""Exercise: pack every token into one row of bytes for every rank.

    python stages/02_fixed_capacity/exercises/pack_rows_skeleton.py     # says what is wrong, or that it is right

Legend: D ranks, C capacity, B bytes of a row, T tokens here, H hidden, K experts per token.
"""

import torch
from torch import Tensor

from epmoe.core.packed_rows import RowLayout
from epmoe.core.toy import TOY


def answer(
    send_DCB: Tensor, layout: RowLayout, x_TH: Tensor, slots_DTK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Token t for rank d goes to send[d, t], whoever wants it there. Returns send_DCB, written in place.

    Args:
        send_DCB: [D, C, B] uint8, full of what the last call left behind; T <= C.
        layout: gives writable views of the fields of rows: x, slots, weights, valid.
        x_TH, weights_TK: the tokens and their routing weights; the same for every rank.
        slots_DTK: int32, the slot of each named expert on rank d, -1 where d does not own it.

    Rows from T on are padding: only their flag is written. No loop, and nothing that the host has to read.
    """
    # >>> your code
    tokens = len(x_TH)
    layout.x(send_DCB)[:, :tokens] = x_TH
    layout.slots(send_DCB)[:, :tokens] = slots_DTK
    layout.weights(send_DCB)[:, :tokens] = weights_TK
    layout.valid(send_DCB)[:, :tokens] = 1
    layout.valid(send_DCB)[:, tokens:] = 0
    return send_DCB
    # <<< your code


def check() -> None:
    """Rank 0 of the toy with one row to spare; raises AssertionError with the field that is wrong."""
    capacity, left_behind = TOY.capacity + 1, 0x55
    layout = RowLayout(TOY.shape.hidden, TOY.shape.topk, torch.float32)
    send_DCB = torch.full((TOY.ranks, capacity, layout.row_bytes), left_behind, dtype=torch.uint8)
    slots_DTK = torch.tensor([[[0, 1], [1, -1]], [[-1, -1], [-1, 0]]], dtype=torch.int32)
    x_TH, weights_TK = TOY.x_TH(0), TOY.gates_TK(0)
    answer(send_DCB, layout, x_TH, slots_DTK, weights_TK)
    tokens = len(x_TH)
    for d in range(TOY.ranks):
        for t in range(tokens):
            where = f"send[{d}, {t}]"
            row_B = send_DCB[d, t]
            assert torch.equal(layout.x(row_B), x_TH[t]), f"hidden values of {where}"
            assert torch.equal(layout.slots(row_B), slots_DTK[d, t]), f"slots of {where}"
            assert torch.equal(layout.weights(row_B), weights_TK[t]), f"weights of {where}"
            assert layout.valid(row_B) == 1, f"valid flag of {where}"
        padding_B = send_DCB[d, tokens]
        assert layout.valid(padding_B) == 0, f"valid flag of the padding row send[{d}, {tokens}]"
        kept = padding_B[: layout.valid_at] == left_behind
        assert kept.all(), f"send[{d}, {tokens}] is padding: write its flag and nothing else"


if __name__ == "__main__":
    check()
    print("right")
