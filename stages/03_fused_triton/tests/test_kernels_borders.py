"""Where launchers change their path, and where an offset leaves 32 bits: one below, on and above each border.

255 to 257 tokens: the pack kernel writes for one rank or for all, the sums cut rows finer. 511 to 513 slots: other
warps group them. 8192: two launches do it. 65536: in larger blocks of slots. Every step is held against its twin in
plain torch. What the interpreter would take long for, and does not tell apart, waits for a GPU.
"""

import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: @triton.jit looks at it

from epmoe.core.packed_rows import RowLayout
from epmoe.core.placement import contiguous
from epmoe.core.split import Rows
from epmoe.fused_triton import kernels as kn
from epmoe.fused_triton import twins

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANKS, EXPERTS, HIDDEN, TOPK = 2, 6, 5, 1
NO_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device: make test-gpu")


def on_gpu(*values: int) -> list:
    return [pytest.param(value, marks=[pytest.mark.gpu, NO_GPU]) for value in values]


def tables():
    place = contiguous(EXPERTS, RANKS)
    as_int = {"dtype": torch.int32, "device": DEVICE}
    return torch.tensor(place.owners, **as_int), torch.tensor(place.slots, **as_int)


def draw(tokens: int):
    """Whole numbers, so that every sum is exact: x, ids with some that name nobody, weights."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randint(-9, 10, (tokens, HIDDEN), generator=generator).float()
    ids = torch.randint(-1, EXPERTS + 1, (tokens, TOPK), generator=generator, dtype=torch.int32)
    return x.to(DEVICE), ids.to(DEVICE), torch.ones(tokens, TOPK, device=DEVICE)


def packed(tokens: int, capacity: int):
    """What the kernel and its twin pack, [EP, C, B] each."""
    owner_E, slot_E = tables()
    layout = RowLayout(HIDDEN, TOPK, torch.float32)
    buffers = [
        torch.full((RANKS, capacity, layout.row_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
        for _ in range(2)
    ]
    kn.route_and_pack(draw(tokens)[0], owner_E, slot_E, buffers[0], *draw(tokens)[1:])
    exchange = SimpleNamespace(layout=layout, owner_E=owner_E, slot_E=slot_E)
    twins.pack(exchange, buffers[1], *draw(tokens))  # pyright: ignore[reportArgumentType]
    return layout, *buffers


@pytest.mark.parametrize("capacity", [256, 257, *on_gpu(255, 511, 512, 513)])
def test_pack_and_merge_at_a_border_of_tokens(capacity):
    tokens = capacity - 1
    layout, send, want = packed(tokens, capacity)
    assert torch.equal(layout.slots(send), layout.slots(want))
    assert torch.equal(layout.valid(send), layout.valid(want))
    assert torch.equal(layout.x(send)[:, :tokens], layout.x(want)[:, :tokens])
    known = layout.slots(want)[:, :tokens] >= 0
    assert torch.equal(
        layout.weights(send)[:, :tokens][known], layout.weights(want)[:, :tokens][known]
    )
    home = layout.x(want).contiguous()
    y, y_twin = torch.empty(2, tokens, HIDDEN, device=DEVICE)
    kn.merge_ranks(home, y)
    twins.merge_ranks(home, y_twin, ring=False)
    assert torch.equal(y, y_twin)


@pytest.mark.parametrize("count", [255, 256, 257, 511, 512, 513])
def test_group_gather_and_reduce_at_a_border_of_rows(count):
    x, ids, weights = draw(count)
    rows, experts = Rows(x_RH=x, slots_RJ=ids, weights_RJ=weights), EXPERTS
    tiles, twin = (kn.make_tiles(count, experts, 16, DEVICE) for _ in range(2))
    kn.group_slots(ids, experts, tiles)
    twins.group_slots(ids, experts, twin)
    same_list(tiles, twin)
    covered = int(twin.offsets[-1])
    x_NH = kn.gather_rows(rows, tiles, None)
    assert torch.equal(x_NH[:covered], x[twin.sorted_slots[:covered].long()])
    y = torch.full((count, HIDDEN), float("nan"), device=DEVICE)
    kn.reduce_slots(ids, x, experts, y)
    assert torch.equal(y, twins.reduce_slots(ids, x, experts))


@pytest.mark.parametrize("slots", [8193, 65535, 65536, 65537, *on_gpu(8191, 8192)])
def test_metadata_at_a_border_of_slots(slots):
    generator = torch.Generator().manual_seed(slots)
    ids = torch.randint(-1, 8, (slots, 1), generator=generator, dtype=torch.int32).to(DEVICE)
    tiles, twin = (kn.make_tiles(slots, 7, 128, DEVICE) for _ in range(2))
    kn.group_slots(ids, 7, tiles)
    twins.group_slots(ids, 7, twin)
    same_list(tiles, twin)


def same_list(tiles, twin):
    count = int(twin.num_tiles)
    assert torch.equal(tiles.sorted_slots, twin.sorted_slots)
    assert torch.equal(tiles.offsets, twin.offsets)
    assert int(tiles.num_tiles) == count
    assert torch.equal(tiles.tiles[:count], twin.tiles[:count])


FAR = 2**30  # values from row to row: the third row starts at 2**31


def far_rows() -> torch.Tensor:
    """[3, H] float16 rows so far apart that the last does not start within 32 bits; 4 GiB, of which little is used."""
    whole = torch.empty(2 * FAR + HIDDEN, dtype=torch.float16, device=DEVICE)
    return whole.as_strided((3, HIDDEN), (FAR, 1))


@pytest.mark.gpu
@NO_GPU
def test_rows_beyond_32_bits_are_read_and_written_where_they_are():
    x = far_rows()
    x.copy_(torch.arange(3.0 * HIDDEN).view(3, HIDDEN))
    ids = torch.tensor([[0], [4], [1]], dtype=torch.int32, device=DEVICE)
    weights = torch.ones(3, 1, device=DEVICE)
    layout = RowLayout(HIDDEN, 1, torch.float16)
    send = torch.zeros(RANKS, 3, layout.row_bytes, dtype=torch.uint8, device=DEVICE)
    kn.route_and_pack(x, *tables(), send, ids, weights)
    assert torch.equal(layout.x(send)[0], x)
    rows = Rows(x_RH=x, slots_RJ=ids, weights_RJ=weights)
    assert torch.equal(kn.prepare_rows(rows, EXPERTS).x_RH, x)
    tiles = kn.group_slots(ids, EXPERTS, kn.make_tiles(3, EXPERTS, 16, DEVICE))
    assert torch.equal(kn.gather_rows(rows, tiles, None), x[[0, 2, 1]])
    y = far_rows()
    kn.merge_ranks(layout.x(send).contiguous(), y)
    assert torch.equal(y, x * RANKS)
