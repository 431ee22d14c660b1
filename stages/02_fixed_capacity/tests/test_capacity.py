"""Capacity: guards around every buffer, more tokens than fit, strict layers, and memory that the prompt does not grow.

Legend: T tokens, C capacity, EP ranks, H hidden, N = EP * C * K assignments of a round.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epmoe.core import groups, ledger
from epmoe.core.cases import Case
from epmoe.core.conformance.live_peak import LivePeak
from epmoe.core.conformance.program import caught, judge
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.packed_rows import RowLayout
from epmoe.core.shape import MoEShape
from epmoe.core.verify import Row, bring, build_case, call_once
from epmoe.core.workspace import Workspace
from epmoe.fixed_capacity.experts import BLOCK

STAGE = Path(__file__).parents[1].name
SHAPE = MoEShape(hidden=16, intermediate=24, experts=8, topk=2)
GUARD, GUARD_BYTES = 0xA5, 256


class GuardedWorkspace(Workspace):
    """Buffers inside of larger ones: `intact` says whether anybody wrote around them."""

    def buffer(self, name, shape, dtype, device) -> Tensor:
        key = (name, shape, dtype, device)
        if key not in self._buffers:
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            around = torch.full((nbytes + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
            self._buffers[key] = around[GUARD_BYTES:-GUARD_BYTES].view(dtype).view(shape)
        return self._buffers[key]

    def intact(self) -> bool:
        def sides(buffer: Tensor) -> Tensor:
            whole = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
            return torch.cat([whole[:GUARD_BYTES], whole[-GUARD_BYTES:]])

        return all(bool((sides(b) == GUARD).all()) for b in self._buffers.values())


@pytest.mark.parametrize("offset", [-1, 1])
def test_guards_see_a_write_beside_a_buffer(offset):
    workspace = GuardedWorkspace()
    buffer = workspace.buffer("some", (4, 3), torch.float32, torch.device("cpu"))
    buffer.fill_(1)
    assert workspace.intact()
    beside = buffer.as_strided((4, 3), (3, 1), buffer.storage_offset() + offset)
    beside.fill_(1)
    assert not workspace.intact()


def guarded(group: EPGroup, case: Case) -> tuple[list[Row | None], bool, bool]:
    """The worst row of every call; are the guards whole; are rows past a declared number of tokens untouched?"""
    workspace = GuardedWorkspace()
    layer = build_case(group, replace(case, options={"workspace": workspace}))
    rows, spared = [], True
    for call in range(len(case.tokens)):
        most = case.max_tokens(call)
        for buffer in workspace._buffers.values():
            buffer.view(torch.uint8).fill_(GUARD)
        y_TH = layer(*bring(group, case, call), max_tokens=most)
        rows.append(judge(case, call, group, y_TH))
        used = group.size * max(1, min(most or 2**30, case.max_tokens_per_rank))
        for buffer in workspace._buffers.values():
            spared &= bool((buffer[used:].view(torch.uint8) == GUARD).all())
    layer.close()
    return rows, workspace.intact(), spared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "asked"])
def test_nothing_is_written_beside_the_buffers(stage, run, dtype, declared):
    """Full, empty, uneven and small calls, H = 5; with `max_tokens` what lies past EP * max_tokens rows is spared."""
    shape = MoEShape(hidden=5, intermediate=7, experts=6, topk=3)
    tokens = ((8, 8, 8), (0, 0, 0), (1, 0, 3), (8, 0, 1), (19, 2, 8))
    case = Case(stage=stage, shape=shape, tokens=tokens, dtype=dtype, capacity=8, declared=declared)
    for rows, intact, spared in run(guarded, case):
        assert all(row is None or row.right for row in rows), rows
        assert (intact, spared) == (True, True)


# ---- more than fits


@pytest.mark.parametrize("tokens", [(16, 16), (16, 0), (3, 16)], ids=str)
def test_9C_everything_on_one_expert(stage, run, tokens):
    """9C, 9E: C = 4, all tokens of all ranks on expert 6: rounds drop nothing, not even in the worst case."""
    ids = [[[[6, 6]] * t for t in tokens]]
    case = Case(stage=stage, shape=SHAPE, tokens=(tokens,), ids=ids, capacity=4)
    for rows, intact, _ in run(guarded, case):
        assert all(row is None or row.right for row in rows), rows
        assert intact


def strict(group: EPGroup, case: Case) -> tuple[str, int, Row | None, bool]:
    """What a call with too many tokens says, how often it moved data, and the next call that fits."""
    workspace = GuardedWorkspace()
    layer = build_case(group, replace(case, options={"workspace": workspace}))
    with ledger.record() as book:
        said = caught(lambda: layer(*bring(group, case, 0), max_tokens=case.max_tokens(0)))
    moved = len(book.collectives)
    row = judge(case, 1, group, layer(*bring(group, case, 1)))
    layer.close()
    return said, moved, row, workspace.intact()


@pytest.mark.parametrize(
    ("tokens", "declared", "check"),
    [((3, 16), False, False), ((16, 3), True, False), ((3, 16), False, True)],
    ids=["asked", "declared", "checked"],
)
def test_9C_strict_layers_refuse_on_all_ranks(stage, run, tokens, declared, check):
    """9C: with overflow="raise" every rank raises before it sends anything, and the layer works on."""
    case = Case(
        stage=stage, shape=SHAPE, tokens=(tokens, (2, 4)), capacity=4, overflow="raise",
        declared=declared, check=check,
    )  # fmt: skip
    for said, moved, row, intact in run(strict, case):
        assert said.startswith("CapacityError: ")
        assert "16 tokens on a rank" in said
        assert "max_tokens_per_rank=4" in said
        assert 'overflow="rounds"' in said
        assert (moved, intact) == (0, True)
        assert row.right, row


# ---- much room, and none


def test_9B_room_that_nobody_uses_costs_no_work(stage, run):
    """9B: three tokens with C = 8 and C = 16384: the same ledger, allocations and computed rows included."""

    def books(capacity: int) -> list[dict]:
        case = Case(stage=stage, shape=SHAPE, tokens=((3, 1),), capacity=capacity)
        return run(ledger_of, case)

    assert books(8) == books(16384)


def ledger_of(group: EPGroup, case: Case) -> dict:
    layer = build_case(group, case)
    _, book, problems = call_once(layer, bring(group, case, 0))
    assert layer.describe()["workspace_bytes"] == kept_bytes(case)
    layer.close()
    assert not problems
    return book.summary()


@pytest.mark.parametrize("capacity", [-1, 2.5])
def test_9B_no_room_is_refused(stage, capacity):
    case = Case(stage=stage, shape=SHAPE, tokens=((3,),), capacity=capacity)
    with pytest.raises(InputError, match=r"max_tokens_per_rank=.*must be at least 1"):
        build_case(groups.single(), case)


def test_9E_terms_that_stay_keep_their_weight(stage):
    """9E: weights that do not sum to 1, one expert of four struck out: what is missing is its term, nothing else."""
    shape = SHAPE.with_(topk=4)
    case = Case(stage=stage, shape=shape, tokens=((1,),), ids=[[[[1, 3, 5, 7]]]], capacity=2)
    layer = build_case(groups.single(), case)
    x_TH, ids_TK, _ = bring(groups.single(), case, 0)
    weights_TK = torch.tensor([[0.5, 2.0, 0.25, 4.0]])
    y_TH = layer(x_TH, ids_TK, weights_TK)
    only_TH = layer(x_TH, torch.tensor([[-1, 3, -1, -1]]), weights_TK)
    rest_TH = layer(x_TH, torch.tensor([[1, -1, 5, 7]]), weights_TK)
    layer.close()
    torch.testing.assert_close(rest_TH + only_TH, y_TH, rtol=0, atol=float(y_TH.abs().max()) * 1e-6)
    assert only_TH.abs().max() > 0.01 * y_TH.abs().max()


# ---- memory


def kept_bytes(case: Case) -> int:
    """The layer's docstring: EP * C * (2 B + 4 H)."""
    row_bytes = RowLayout(case.shape.hidden, case.shape.topk, case.dtype).row_bytes
    return case.ranks * case.max_tokens_per_rank * (2 * row_bytes + 4 * case.shape.hidden)


def round_bytes(case: Case) -> int:
    """The layer's docstring: rows of a round, without indices and the copy of one expert's weights."""
    H, N = case.shape.hidden, case.ranks * case.max_tokens_per_rank * case.shape.topk
    padded = N + BLOCK * -(-case.shape.experts // case.ranks)
    return H * (4 * N + max(2 * case.dtype.itemsize * padded, 4 * N + 8 * N // case.shape.topk))


def long_prompt(group: EPGroup, case: Case) -> tuple[list[Row | None], list[int], int]:
    """Some rows of every call, the peak of live results in each, the bytes that the layer says it keeps."""
    layer, rows, peaks = build_case(group, case), [], []
    for call in range(len(case.tokens)):
        arguments = bring(group, case, call)
        with LivePeak() as live:
            y_TH = layer(*arguments)
        rows.append(judge(case, call, group, y_TH))
        peaks.append(live.peak)
        del y_TH
    kept = int(str(layer.describe()["workspace_bytes"]))
    layer.close()
    return rows, peaks, kept


def test_9D_long_prompt_in_bounded_memory(stage, run):
    """8192 and 8000 tokens through C = 512: 16 rounds, right, and no more memory than one round and the result."""
    shape = SHAPE.with_(hidden=64)
    case = Case(
        stage=stage, shape=shape, tokens=((512, 512), (8192, 8000)), kind="zipf", capacity=512,
        rows=24,
    )  # fmt: skip
    indices = 96 * (2 * 512 * 2 + 4 * BLOCK) + 4 * 3 * 64 * 24
    for rank, (rows, (one, sixteen), kept) in enumerate(run(long_prompt, case, timeout=100.0)):
        assert all(row.right for row in rows), rows
        assert kept == kept_bytes(case)
        assert round_bytes(case) <= one <= round_bytes(case) + indices
        result = case.tokens[1][rank] * 64 * 4
        assert one < sixteen <= one + result
