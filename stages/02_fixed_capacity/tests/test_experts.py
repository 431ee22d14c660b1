"""The experts without ranks: the order, the list of blocks, both products, against plain Python.

Legend: N assignments, E experts of this rank, R received rows, J places per row, H hidden.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.errors import UnsupportedError
from epmoe.core.poison import poisoned
from epmoe.core.shape import MoEShape
from epmoe.core.split import Rows
from epmoe.core.verify import differ, tolerance
from epmoe.core.weights import ExpertWeights, random_weights
from epmoe.fixed_capacity import experts as module
from epmoe.fixed_capacity.experts import BLOCK, StaticExperts, block_map, sort_by_slot

SHAPE = MoEShape(hidden=16, intermediate=24, experts=5, topk=2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
usual = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def rows_of(slots: list[list[int]], hidden: int, dtype: torch.dtype = torch.float32) -> Rows:
    generator = torch.Generator().manual_seed(len(slots))
    slots_RJ = torch.tensor(slots, dtype=torch.int32)
    return Rows(
        x_RH=torch.randn(len(slots), hidden, generator=generator).to(dtype),
        slots_RJ=slots_RJ,
        weights_RJ=torch.rand(slots_RJ.shape, generator=generator) + 0.1,
    )


def wrong_by(y_RH: Tensor, rows: Rows, weights: ExpertWeights) -> float:
    """The largest error of a row, relative to the terms that were added; a row without any must be zero."""
    exact, worst = weights.to(torch.float64), 0.0
    for r, slots in enumerate(rows.slots_RJ.tolist()):
        wanted_H, terms = torch.zeros(weights.hidden, dtype=torch.float64), 0.0
        for slot, gate in zip(slots, rows.weights_RJ[r].tolist(), strict=True):
            if slot >= 0:
                gate_I, up_I = (exact.w13_E2IH[slot] @ rows.x_RH[r].double()).chunk(2)
                f_H = exact.w2_EHI[slot] @ (gate_I * gate_I.sigmoid() * up_I)
                wanted_H += gate * f_H
                terms += gate * float(f_H.abs().max())
        off = float(torch.nan_to_num((y_RH[r] - wanted_H).abs(), nan=torch.inf).max())
        worst = max(worst, off / terms if terms else off * torch.inf if off else 0.0)
    return worst


# ---- the order


def test_the_worked_example_by_hand(monkeypatch):
    """The module's: slots 2 0 -1 2 2 0, three experts, blocks of 2 rows; order 1 5 | 0 3 4 | 2."""
    monkeypatch.setattr(module, "BLOCK", 2)
    slots_RJ = torch.tensor([[2, 0], [-1, 2], [2, 0]], dtype=torch.int32)
    order_N, offsets = sort_by_slot(slots_RJ, 3)
    assert order_N.tolist() == [1, 5, 0, 3, 4, 2]
    assert offsets.tolist() == [0, 2, 2, 5]
    expert_B, place_BM = block_map(offsets, 6)
    assert expert_B[:3].tolist() == [0, 2, 2]
    assert place_BM.tolist() == [[0, 1], [2, 3], [4, -1], [-1, -1], [-1, -1], [-1, -1]]
    assert order_N[place_BM[:2]].tolist() == [[1, 5], [0, 3]]


@usual
@given(st.integers(1, 7), st.data())
def test_sort_by_slot_is_a_stable_sort(experts, data):
    places = data.draw(st.integers(1, 4))
    row = st.lists(st.integers(-1, experts - 1), min_size=places, max_size=places)
    slots = data.draw(st.lists(row, min_size=1, max_size=20))
    order_N, offsets = sort_by_slot(torch.tensor(slots, dtype=torch.int32), experts)
    flat = [slot for row in slots for slot in row]
    groups = [[n for n, slot in enumerate(flat) if slot == e] for e in [*range(experts), -1]]
    assert order_N.tolist() == [n for group in groups for n in group]
    assert offsets.tolist() == [sum(len(g) for g in groups[:e]) for e in range(experts + 1)]
    assert offsets.dtype == torch.int32


def blocks_by_hand(counts: list[int]) -> list[tuple[int, list[int]]]:
    """(expert, places in the sorted order) of every block, in plain Python."""
    blocks, start = [], 0
    for expert, count in enumerate(counts):
        places = list(range(start, start + count))
        blocks += [(expert, places[i : i + BLOCK]) for i in range(0, count, BLOCK)]
        start += count
    return blocks


@usual
@given(st.lists(st.integers(0, 70), min_size=1, max_size=9), st.integers(0, 40))
@example([1] * 9, 0)
@example([BLOCK + 1] * 4, 0)  # as many half-empty blocks as there can be
@example([BLOCK] * 3, 0)
@example([0, 0, 0], 1)
@example([1, 0, 7, 8, 9], 0)
def test_the_list_of_blocks_is_complete(counts, nobody):
    """Every assignment of an expert stands in one block of that expert; the bounded list is never too short."""
    if not sum(counts) + nobody:
        nobody = 1
    N = sum(counts) + nobody
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    expert_B, place_BM = block_map(offsets, N)
    assert len(expert_B) == min(N, N // BLOCK + len(counts))
    assert int(expert_B.min()) >= 0
    assert int(expert_B.max()) < len(counts)
    listed = zip(expert_B.tolist(), place_BM.tolist(), strict=True)
    found = [(expert, [p for p in row if p >= 0]) for expert, row in listed]
    assert [block for block in found if block[1]] == blocks_by_hand(counts)
    assert not any(places for _, places in found[len(blocks_by_hand(counts)) :])


# ---- the values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topk", [1, 2], ids=lambda k: f"K{k}")
def test_3B_nearly_empty_blocks(dtype, topk):
    """3B: T = 17 over 9 experts in blocks of 16; fresh index memory holds 0x7fffffff, fresh rows NaN."""
    shape = MoEShape(hidden=16, intermediate=24, experts=9, topk=topk)
    weights = random_weights(shape, range(9), dtype)
    rows = rows_of([[(t + 4 * j) % 9 for j in range(topk)] for t in range(17)], 16, dtype)
    with poisoned():
        y_RH = StaticExperts(weights)(rows)
    assert y_RH.dtype == torch.float32
    assert wrong_by(y_RH, rows, weights) <= tolerance(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_3E_padding_is_added_to_no_row(dtype):
    """3E: 1, 0, 7, 8 and 9 rows an expert; padding reads row 0, and row 0 is right all the same."""
    weights = random_weights(SHAPE, range(5), dtype)
    slots = [[e] for e, count in enumerate((1, 0, 7, 8, 9)) for _ in range(count)]
    rows = rows_of(slots, 16, dtype)
    with ledger.record() as book:
        y_RH = StaticExperts(weights)(rows)
    assert wrong_by(y_RH[:1], _first(rows), weights) <= tolerance(dtype)
    assert wrong_by(y_RH, rows, weights) <= tolerance(dtype)
    assert book.rows_computed == BLOCK * (25 // BLOCK + 5)
    assert book.host_syncs.total() == 0


def _first(rows: Rows) -> Rows:
    return Rows(x_RH=rows.x_RH[:1], slots_RJ=rows.slots_RJ[:1], weights_RJ=rows.weights_RJ[:1])


@pytest.mark.parametrize("topk", [2, 8], ids=lambda k: f"K{k}")
def test_5E_every_number_of_rows(topk):
    """5E: 1 to 130 rows and those around 256: never wrong, never all zero."""
    shape = MoEShape(hidden=8, intermediate=8, experts=8, topk=topk)
    weights = random_weights(shape, range(8))
    compute = StaticExperts(weights)
    for count in (*range(1, 34), 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257):
        rows = rows_of([[(3 * t + j) % 8 for j in range(topk)] for t in range(count)], 8)
        y_RH = compute(rows)
        assert (y_RH != 0).any(dim=1).all(), count
        last = Rows(
            x_RH=rows.x_RH[-3:], slots_RJ=rows.slots_RJ[-3:], weights_RJ=rows.weights_RJ[-3:]
        )
        assert wrong_by(y_RH[-3:], last, weights) <= tolerance(torch.float32), count


def test_what_no_slot_names_is_never_used():
    """NaN rows without a slot, NaN weights of places without one: the rest keeps its bits, those rows are zero."""
    weights = random_weights(SHAPE, range(5))
    rows = rows_of([[-1, -1], [3, -1], [-1, -1], [0, 4], [-1, 2]], 16)
    y_RH = StaticExperts(weights)(rows)
    rows.x_RH[[0, 2]] = torch.nan
    rows.weights_RJ[rows.slots_RJ < 0] = torch.nan
    again_RH = StaticExperts(weights)(rows)
    assert not differ(y_RH, again_RH)
    assert (again_RH[[0, 2]] == 0).all()
    assert wrong_by(again_RH, rows, weights) <= tolerance(torch.float32)


def test_nan_of_one_token_stays_in_its_row():
    """A broken token spoils itself, not those that share its block."""
    weights = random_weights(SHAPE, range(5))
    rows = rows_of([[1, 2], [1, 2], [2, 1]], 16)
    rows.x_RH[1] = torch.nan
    y_RH = StaticExperts(weights)(rows)
    assert y_RH.isnan().all(dim=1).tolist() == [False, True, False]
    assert not y_RH[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rank_without_experts_answers_zeros(dtype):
    rows = rows_of([[-1, -1], [-1, -1]], 16, dtype)
    rows.x_RH.fill_(torch.nan)
    y_RH = StaticExperts(random_weights(SHAPE, [], dtype))(rows)
    assert (y_RH.dtype, tuple(y_RH.shape)) == (torch.float32, (2, 16))
    assert (y_RH == 0).all()


# ---- the choice of the product


def test_grouped_mm_is_refused_here_with_every_reason():
    odd = random_weights(MoEShape(hidden=12, intermediate=7, experts=2, topk=1), range(2))
    with pytest.raises(UnsupportedError) as refusal:
        StaticExperts(odd, "grouped_mm")
    for reason in ("a CUDA device", "the weights are torch.float32", "H=12 and I=7", "cannot run"):
        assert reason in str(refusal.value)
    usual = random_weights(SHAPE, range(2), torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"it needs a CUDA device$"):
        StaticExperts(usual, "grouped_mm")
    assert StaticExperts(usual).product == "blocks"


def test_a_product_of_another_name_is_refused():
    with pytest.raises(UnsupportedError, match="choose auto, grouped_mm or blocks"):
        StaticExperts(random_weights(SHAPE, range(2)), "fastest")


def loop_grouped_mm(x_NH: Tensor, w_EHI: Tensor, *, offs: Tensor) -> Tensor:
    """torch's grouped product as a loop; what lies behind the last offset is left as it was, here NaN."""
    y_NI = x_NH.new_full((len(x_NH), w_EHI.shape[2]), torch.nan)
    start = 0
    for w_HI, end in zip(w_EHI, offs.tolist(), strict=True):
        y_NI[start:end] = x_NH[start:end] @ w_HI
        start = end
    return y_NI


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_grouped_rows_find_their_way_back(monkeypatch, dtype):
    """The path of `grouped_mm` with the product as a loop: places without an expert are behind the end, and inert."""
    monkeypatch.setattr(F, "grouped_mm", loop_grouped_mm)
    weights = random_weights(SHAPE, range(5), dtype)
    rows = rows_of([[3, -1], [-1, -1], [0, 0], [4, 3], [-1, 1], [3, 4]], 16, dtype)
    rows.x_RH[1] = torch.nan
    compute = StaticExperts(weights)
    compute.product = "grouped_mm"  # as on Hopper
    with poisoned():
        y_RH = compute(rows)
    # one rounding of f to the dtype more than `blocks` has
    assert wrong_by(y_RH, rows, weights) <= 1.5 * tolerance(dtype)
    assert (y_RH[1] == 0).all()
