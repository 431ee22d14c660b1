"""Packed rows: where every field lies, counted by hand; and any bits go in and come out, NaN payloads included."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epmoe.core.packed_rows import ROW_ALIGNMENT, RowLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
STALE = 0xA5


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit pattern alike: one in 256 bfloat16 values is infinite or not a number, with any payload."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def bits(x: Tensor) -> list:
    return x.contiguous().view(WORDS[x.dtype.itemsize]).tolist()


@pytest.mark.parametrize(
    ("hidden", "topk", "dtype", "slots", "weights", "valid", "row"),
    [
        pytest.param(4, 2, torch.float32, 16, 24, 32, 48, id="toy"),
        pytest.param(5, 1, torch.float16, 12, 16, 20, 32, id="H5-half"),  # 10 bytes, 2 of pad
        pytest.param(5, 1, torch.float32, 20, 24, 28, 32, id="H5-no_pad"),
        pytest.param(3, 3, torch.float8_e4m3fn, 4, 16, 28, 32, id="H3-bytes"),
        pytest.param(1, 1, torch.bfloat16, 4, 8, 12, 16, id="one_word"),
        pytest.param(2048, 8, torch.bfloat16, 4096, 4128, 4160, 4176, id="H2048-K8"),
    ],
)
def test_offsets_by_hand(hidden, topk, dtype, slots, weights, valid, row):
    layout = RowLayout(hidden, topk, dtype)
    assert (layout.slots_at, layout.weights_at, layout.valid_at) == (slots, weights, valid)
    assert layout.row_bytes == row


sizes = st.builds(RowLayout, st.integers(1, 70), st.integers(1, 12), st.sampled_from(DTYPES))


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(sizes)
def test_fields_follow_each_other_on_word_borders(layout):
    end_of_x = layout.hidden * layout.dtype.itemsize
    assert 0 <= layout.slots_at - end_of_x < 4
    assert layout.weights_at - layout.slots_at == layout.valid_at - layout.weights_at
    assert layout.weights_at - layout.slots_at == 4 * layout.topk
    assert 0 <= layout.row_bytes - (layout.valid_at + 4) < ROW_ALIGNMENT
    assert layout.slots_at % 4 == 0
    assert layout.row_bytes % ROW_ALIGNMENT == 0


def by_struct(layout: RowLayout, x_H: Tensor, slots: list[int], weights_K: Tensor, valid: int):
    """The same row, put together by Python's struct module; what is not a field keeps STALE."""
    row = bytearray([STALE]) * layout.row_bytes
    raw = bytes(x_H.view(torch.uint8).tolist())
    row[: len(raw)] = raw
    struct.pack_into(f"={len(slots)}i", row, layout.slots_at, *slots)
    words = weights_K.view(torch.int32).tolist()
    struct.pack_into(f"={len(slots)}i", row, layout.weights_at, *words)
    struct.pack_into("=i", row, layout.valid_at, valid)
    return list(row)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(sizes, st.integers(1, 3), st.integers(0, 4), st.integers(0, 10_000))
def test_any_bits_go_in_and_come_out(layout, ranks, tokens, seed):
    """Fields written for the first T rows of a longer buffer: those bytes, no others, and the same bits again."""
    x_TH = random_bits((tokens, layout.hidden), layout.dtype, seed)
    slots_TK = random_bits((tokens, layout.topk), torch.int32, seed + 1)
    weights_TK = random_bits((tokens, layout.topk), torch.float32, seed + 2)
    rows_DCB = torch.full((ranks, tokens + 2, layout.row_bytes), STALE, dtype=torch.uint8)
    layout.x(rows_DCB)[:, :tokens] = x_TH
    layout.slots(rows_DCB)[:, :tokens] = slots_TK
    layout.weights(rows_DCB)[:, :tokens] = weights_TK
    layout.valid(rows_DCB)[:, :tokens] = 1
    for block_CB in rows_DCB:
        for t in range(tokens):
            wanted = by_struct(layout, x_TH[t], slots_TK[t].tolist(), weights_TK[t], 1)
            assert block_CB[t].tolist() == wanted
        assert (block_CB[tokens:] == STALE).all()
        assert bits(layout.x(block_CB)[:tokens]) == bits(x_TH)
        assert layout.slots(block_CB)[:tokens].tolist() == slots_TK.tolist()
        assert bits(layout.weights(block_CB)[:tokens]) == bits(weights_TK)
        assert layout.valid(block_CB)[:tokens].tolist() == [1] * tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_keep_their_bits(dtype):
    """Quiet and signalling NaN with payloads, both zeros, infinities, the smallest subnormal."""
    words = {
        torch.float32: [0x7FC00001, 0x7F800001, -1, -(2**31), 0x7F800000, 1],
        torch.bfloat16: [0x7FC1, 0x7F81, -1, -(2**15), 0x7F80, 1],
        torch.float16: [0x7E01, 0x7C01, -1, -(2**15), 0x7C00, 1],
        torch.float8_e4m3fn: [0x7F, 0xFF, 0x80, 0x00, 0x7E, 1],
    }[dtype]
    x_TH = torch.tensor([words], dtype=WORDS[dtype.itemsize]).view(dtype)
    layout = RowLayout(len(words), 1, dtype)
    rows_TB = torch.zeros(1, layout.row_bytes, dtype=torch.uint8)
    layout.x(rows_TB)[:] = x_TH
    assert bits(layout.x(rows_TB.clone())) == [words]


def test_fields_are_views():
    """Nothing is copied: what arrives in the rows is seen through fields that were taken before."""
    layout = RowLayout(5, 2, torch.float16)
    rows_CB = torch.zeros(3, layout.row_bytes, dtype=torch.uint8)
    fields = (layout.x(rows_CB), layout.slots(rows_CB), layout.weights(rows_CB))
    assert [tuple(field.shape) for field in fields] == [(3, 5), (3, 2), (3, 2)]
    assert layout.valid(rows_CB).shape == (3,)
    rows_CB.fill_(255)
    assert fields[0].isnan().all()
    assert fields[1].tolist() == [[-1, -1]] * 3
    assert fields[2].isnan().all()
