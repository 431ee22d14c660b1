"""The metadata kernels against a stable sort: expert-major slots, offsets, the bounded list of tiles."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: @triton.jit looks at it

from epmoe.core.errors import InputError
from epmoe.core.packed_rows import RowLayout
from epmoe.core.split import Rows
from epmoe.fused_triton import kernels as kn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0x7F7F7F7F


def test_toy_slots_are_listed_expert_by_expert():
    """Rank 0 of the toy routing in the package's docstring."""
    rows = recv_with_ids(torch.tensor([[0, 1], [1, -1], [-1, -1], [0, -1]], dtype=torch.int32))
    tiles = kn.group_slots(rows.slots_RJ, 2, kn.make_tiles(8, 2, 16, DEVICE))
    assert tiles.sorted_slots.tolist() == [0, 6, 1, 2, 3, 4, 5, 7]
    assert tiles.offsets.tolist() == [0, 2, 4]
    assert tiles.num_tiles.item() == 2
    assert tiles.tiles[:2].tolist() == [[0, 0, 2, 2], [1, 2, 4, 2]]


def sorted_by_torch(ids_RK: torch.Tensor, experts: int):
    key = ids_RK.flatten().cpu().long()
    key = torch.where((key >= 0) & (key < experts), key, experts)
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    return key.sort(stable=True).indices, torch.cat(
        [torch.zeros(1, dtype=torch.long), counts.cumsum(0)]
    )


def check_tiles(tiles, experts):
    offsets = tiles.offsets.tolist()
    want = [
        [e, start, offsets[e + 1]]
        for e in range(experts)
        for start in range(offsets[e], offsets[e + 1], tiles.tile_rows)
    ]
    assert tiles.tiles[: tiles.num_tiles.item(), :3].tolist() == want
    assert len(want) <= tiles.tiles.shape[0]
    assert tiles.tiles[:, 3].unique().tolist() == [len(want)]


def recv_with_ids(ids_RK: torch.Tensor, hidden: int = 2) -> Rows:
    layout = RowLayout(hidden, ids_RK.shape[1], torch.float32)
    buffer = torch.full((len(ids_RK), layout.row_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    rows = layout.unpack(buffer)
    rows.slots_RJ.copy_(ids_RK)
    return rows


def metadata_case(name: str):
    generator = torch.Generator().manual_seed(7)

    def draw(rows, topk, low, high):
        return torch.randint(low, high, (rows, topk), generator=generator, dtype=torch.int32)

    return {
        "one-slot": (draw(1, 1, 0, 1), 1),
        "all-to-one": (torch.full((40, 3), 2, dtype=torch.int32), 4),
        "nothing": (torch.full((6, 2), -1, dtype=torch.int32), 3),
        "nine-nearly-empty": (torch.arange(17, dtype=torch.int32).view(17, 1) % 9, 9),
        "wild-ids": (draw(50, 3, -4, 12) * 100003, 7),
        "E1024": (draw(80, 4, -1, 1024), 1024),
        "E1023": (draw(80, 4, -1, 1023), 1023),
        "no-rows": (torch.empty(0, 2, dtype=torch.int32), 5),
        "no-experts": (draw(5, 2, -1, 1), 0),
    }[name]


METADATA_CASES = (
    "one-slot all-to-one nothing nine-nearly-empty wild-ids E1024 E1023 no-rows no-experts"
)


@pytest.mark.parametrize("path", ["small", "large"])
@pytest.mark.parametrize("case", METADATA_CASES.split())
def test_metadata_equals_a_stable_sort(case, path, monkeypatch):
    if path == "large":
        monkeypatch.setattr("epmoe.fused_triton.kernels.metadata.SMALL_SLOTS", -1)
        monkeypatch.setattr("epmoe.fused_triton.kernels.metadata._BLOCK", 64)
    ids_RK, experts = metadata_case(case)
    rows, slots = recv_with_ids(ids_RK), ids_RK.numel()
    out = kn.make_tiles(slots, experts, 16, DEVICE)
    for buffer in (out.offsets, out.sorted_slots, out.tiles, out.num_tiles, out.counts):
        buffer.fill_(POISON)
    kn.group_slots(rows.slots_RJ, experts, out)
    want_slots, want_offsets = sorted_by_torch(ids_RK, experts)
    assert out.offsets.tolist() == want_offsets.tolist()
    assert out.sorted_slots.tolist() == want_slots.tolist()
    check_tiles(out, experts)


def test_many_tokens_on_one_expert_are_counted_exactly():
    ids_RK = torch.full((9000, 1), 1, dtype=torch.int32)
    out = kn.group_slots(recv_with_ids(ids_RK).slots_RJ, 2, kn.make_tiles(9000, 2, 128, DEVICE))
    assert out.counts.shape[0] > 0, "9000 slots must take the path of many slots"
    assert out.offsets.tolist() == [0, 0, 9000]
    assert out.sorted_slots.tolist() == list(range(9000))
    check_tiles(out, 2)


@pytest.mark.parametrize(
    ("slots", "experts", "block_m"), [(17, 9, 16), (1, 288, 16), (512, 72, 16), (33, 2, 16)]
)
def test_tile_bound_is_reached_and_never_passed(slots, experts, block_m):
    active = min(slots, experts)
    worst = [1] * active
    for _ in range(slots - active):  # greedily round up as many experts as possible
        worst[min(range(active), key=lambda e: (-worst[e]) % block_m)] += 1
    needed = sum(-(-count // block_m) for count in worst)
    assert needed == kn.max_tiles(slots, experts, block_m)


def test_rows_are_copied_side_by_side_for_tensor_descriptors():
    rows = recv_with_ids(
        torch.tensor([[0, 1], [1, -1], [-1, -1], [0, -1]], dtype=torch.int32), hidden=4
    )
    rows.x_RH[:] = torch.arange(4.0, device=DEVICE)[:, None]
    tiles = kn.group_slots(rows.slots_RJ, 2, kn.make_tiles(8, 2, 16, DEVICE))
    scratch = torch.full((8, 4), float("nan"), device=DEVICE)
    x_NH = kn.gather_rows(rows, tiles, scratch)
    assert x_NH.data_ptr() == scratch.data_ptr()
    assert x_NH[:4, 0].tolist() == [0.0, 3.0, 0.0, 1.0]
    assert x_NH[4:].isnan().all(), "rows behind the last assignment are not this function's"
    with pytest.raises(InputError, match="scratch has 64 bytes: 128 are needed"):
        kn.gather_rows(rows, tiles, scratch[:4])


def test_a_work_list_of_another_size_is_refused():
    rows = recv_with_ids(torch.zeros(4, 2, dtype=torch.int32))
    with pytest.raises(InputError, match="make_tiles"):
        kn.group_slots(rows.slots_RJ, 2, kn.make_tiles(4, 2, 16, DEVICE))
