"""The work list of a layer: one buffer in its workspace, for calls of every size."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: @triton.jit looks at it

from epmoe.core import groups
from epmoe.core.layer import build
from epmoe.core.placement import contiguous
from epmoe.core.shape import MoEShape
from epmoe.core.weights import random_weights
from epmoe.core.workspace import Workspace
from epmoe.fused_triton import kernels, work_list

SIZES = (
    1,
    17,
    8192,
    8193,
    65535,
    65536,
    65537,
    300_000,
)  # both sides of every border in `make_tiles`
PARTS = ("offsets", "sorted_slots", "tiles", "num_tiles", "counts")


@pytest.mark.parametrize("experts", [0, 1, 63, 64, 72, 1024])
def test_the_list_of_every_smaller_call_fits(experts):
    """Rows of tiles as different as they get; shapes alone, on no device."""
    for most in SIZES:
        room = torch.empty(work_list.words(most, experts), dtype=torch.int32, device="meta")
        for slots in (size for size in SIZES if size <= most):
            for rows in (16, 48, 192):
                tiles = kernels.make_tiles(slots, experts, rows, "meta", work_list.Layout(room))
                assert tiles.sorted_slots.shape == (slots,)


def test_parts_do_not_overlap_and_begin_on_16_bytes():
    room = torch.zeros(work_list.words(9000, 5), dtype=torch.int32)
    tiles = kernels.make_tiles(9000, 5, 16, "cpu", work_list.Layout(room))
    for name in PARTS:
        part = getattr(tiles, name)
        assert part.is_contiguous()
        assert part.data_ptr() % 16 == 0, name
        part += 1
    assert room.max() == 1
    assert room.sum() == sum(getattr(tiles, name).numel() for name in PARTS)


def test_calls_of_every_size_use_the_same_addresses_and_close_gives_them_back(monkeypatch):
    """What a captured graph has read stays where it is, until the workspace goes."""
    shape = MoEShape(hidden=16, intermediate=8, experts=4, topk=2)
    placed, alone, shared = contiguous(4, 1), groups.single(), Workspace()
    weights = random_weights(shape, range(4))
    layers = [build("03", shape, weights, placed, alone, 6, workspace=shared) for _ in range(2)]
    before, seen, truth = shared.nbytes, set(), kernels.group_slots

    def group_slots(slots_RJ, experts, out, **how):
        seen.add(out.offsets.data_ptr())
        return truth(slots_RJ, experts, out, **how)

    monkeypatch.setattr(kernels, "group_slots", group_slots)
    for layer in layers:
        for tokens in (6, 1, 5):
            ids_TK = torch.zeros(tokens, 2, dtype=torch.int32)
            routing = (ids_TK, torch.ones(tokens, 2))
            layer(torch.randn(tokens, 16), *routing, max_tokens=tokens)
    assert len(seen) == 1
    assert shared.nbytes == before
    own = build("03", shape, weights, placed, alone, 6)
    own.close()
    assert own.describe()["workspace_bytes"] == 0
