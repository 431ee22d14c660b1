"""Is this stage right? One case = one layer, some calls with known draws, every rank held against the oracle.

    reports = launch(run_case, Case(stage="01", shape=SHAPES["tiny"], tokens=((4, 0), (3, 9))), ranks=2)
    print(report(reports))
    assert all(r.right for r in reports)

The same program is the conformance suite's and `epmoe check`'s. It runs on every rank of a group, and every rank
returns its own `CaseReport`. All draws follow from the case, so any rank can tell what any other one brings.

How close is right: `relative_error` of a row, against `tolerance(dtype)`; the tour and the bench go by the same two.
Legend: T tokens, H hidden, K experts per token, E experts.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.cases import Case
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer, build
from epmoe.core.poison import poisoned
from epmoe.core.weights import ExpertWeights
from epmoe.reference.oracle import expert_output, oracle

_TOLERANCE = {torch.float32: 16.0, torch.bfloat16: 2.0, torch.float16: 2.0}  # in units of eps


@dataclass(frozen=True, kw_only=True)
class Row:
    """One output row against the oracle.

    Attributes:
        rank, call, row: where it is.
        expert: the one that explains most of the error, -1 when the token names none.
        ids: all that the token names.
        column: the worst place of the row, with what came (`got`) and what was `wanted` there.
        error, tolerance: relative to the terms that were added.
    """

    rank: int
    call: int
    row: int
    expert: int
    ids: list[int]
    column: int
    got: float
    wanted: float
    error: float
    tolerance: float

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class CallReport:
    """One call on one rank: `worst` row (None for T=0), broken promises in words, what the ledger counted."""

    call: int
    tokens: int
    worst: Row | None
    problems: list[str]
    ledger: dict
    rows_needed: int


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """All calls on one rank; plain data, so it pickles and `as_dict` is JSON."""

    rank: int
    layer: dict
    calls: list[CallReport]

    @property
    def worst(self) -> Row | None:
        """The row with the largest error of all calls."""
        rows = [call.worst for call in self.calls if call.worst]
        return max(rows, key=lambda row: row.error, default=None)

    @property
    def problems(self) -> list[str]:
        """Broken promises other than the values, with rank and call."""
        return [f"rank {self.rank}, call {c.call}: {p}" for c in self.calls for p in c.problems]

    @property
    def right(self) -> bool:
        return not self.problems and (self.worst is None or self.worst.right)

    def as_dict(self) -> dict:
        return asdict(self)


def tolerance(dtype: torch.dtype) -> float:
    """The largest error, relative to the terms, of a correct layer in `dtype`.

    Half types round three times: gate and up, their product, the result; float32 adds H and I products in the
    library's own order, worst where those of a token's only expert cancel (10 eps in some thousand rows). About twice
    what right code shows, and tests/test_core_verify.py holds it to that.
    """
    return _TOLERANCE[dtype] * torch.finfo(dtype).eps


def relative_error(y_TH: Tensor, wanted_TH: Tensor, terms_T: Tensor) -> Tensor:
    """error_T: max over H of |y - wanted|, divided by the size of the terms that were added (the oracle's `terms_T`).

    A row without any expert has no terms and must be exactly zero: anything else is infinitely wrong, and so is NaN.
    """
    off_T = (y_TH.to(wanted_TH.dtype) - wanted_TH).abs().amax(dim=1)
    error_T = torch.where(off_T == 0, 0.0, off_T / terms_T)
    return error_T.nan_to_num(nan=float("inf"), posinf=float("inf"))


def build_case(group: EPGroup, case: Case) -> MoELayer:
    """The case's layer on this rank. Collective."""
    if group.size != case.ranks:
        raise InputError(f"this case is for {case.ranks} ranks, the group has {group.size}")
    placement, C = case.placed(), case.max_tokens_per_rank
    weights = case.weights_of(placement.experts_of(group.rank)).to(group.device)
    if case.strided:
        weights = ExpertWeights(_with_spare_row(weights.w13_E2IH), _with_spare_row(weights.w2_EHI))
    how = dict[str, Any](check=case.check, overflow=case.overflow, lost=case.lost, **case.options)
    layer = build(case.stage, case.shape, weights, placement, group, C, **how)
    if case.gone:
        layer.mask_ranks(case.gone)
    return layer


def run_case(group: EPGroup, case: Case) -> CaseReport:
    """Build, call, compare, close. Collective; a rank program for `launch` and `RankPool.run`."""
    layer = build_case(group, case)
    everything = case.weights_of(range(case.shape.experts)).to(torch.float64)
    calls, outputs = [], []
    for call in range(len(case.tokens)):
        arguments = bring(group, case, call)
        y_TH, book, problems = call_once(layer, arguments, case.max_tokens(call), case.poison)
        problems += [
            f"the result of call {i} changed"
            for i, (y, kept) in enumerate(outputs)
            if differ(y, kept)
        ]
        outputs.append((y_TH, y_TH.clone()))
        calls.append(
            CallReport(
                call=call,
                tokens=len(y_TH),
                worst=worst_row(case, call, group.rank, y_TH, everything),
                problems=problems,
                ledger=book.summary(),
                rows_needed=case.rows_needed(call, group.rank),
            )
        )
    description = layer.describe()
    layer.close()
    return CaseReport(rank=group.rank, layer=description, calls=calls)


def bring(group: EPGroup, case: Case, call: int) -> tuple[Tensor, Tensor, Tensor]:
    """x_TH, topk_ids_TK and topk_weights_TK of this rank on the group's device, with the case's strides."""
    ids_TK, weights_TK = case.routing(call, group.rank)
    arguments = (case.tokens_of(call, group.rank), ids_TK, weights_TK)
    x_TH, ids_TK, weights_TK = (a.to(group.device) for a in arguments)
    if not case.strided:
        return x_TH, ids_TK, weights_TK
    x_TH = _with_gaps(x_TH) if call % 2 == 0 else x_TH.T.contiguous().T
    return x_TH, _with_gaps(ids_TK), _with_gaps(weights_TK)


def _with_gaps(x: Tensor) -> Tensor:
    """Every second column of a wider tensor; a reader of the gaps gets NaN, or an id of no expert."""
    wide = x.new_full(
        (x.shape[0], 2 * x.shape[1]), float("nan") if x.is_floating_point() else 2**30
    )
    wide[:, ::2] = x
    return wide[:, ::2]


def _with_spare_row(x: Tensor) -> Tensor:
    """The same matrices, one row further apart than their size, as when they are parts of one packed tensor."""
    wide = x.new_full((x.shape[0], x.shape[1] + 1, x.shape[2]), float("nan"))
    wide[:, :-1] = x
    return wide[:, :-1]


def call_once(
    layer: MoELayer,
    arguments: tuple[Tensor, Tensor, Tensor],
    max_tokens: int | None = None,
    poison: bool = True,
) -> tuple[Tensor, ledger.Ledger, list[str]]:
    """One counted call: the result, the ledger, and what it broke of the contract apart from values."""
    before = [a.clone() for a in arguments]
    with poisoned() if poison else contextlib.nullcontext(), ledger.record() as book:
        y_TH = layer(*arguments, max_tokens=max_tokens)
    x_TH, names = arguments[0], ("x", "topk_ids", "topk_weights")
    problems = [
        f"{name} was changed"
        for name, a, b in zip(names, arguments, before, strict=True)
        if differ(a, b)
    ]
    wanted, came = _kind(x_TH), _kind(y_TH)
    if came != wanted:
        problems.append(f"result is {came}, expected {wanted} as x")
    if not y_TH.is_contiguous():
        problems.append(f"result has strides {y_TH.stride()}: not contiguous")
    if y_TH.numel() and any(_storage(y_TH) == _storage(a) for a in arguments):
        problems.append("result shares memory with an input")
    return y_TH, book, problems


def differ(a: Tensor, b: Tensor) -> bool:
    """Are there other bits? NaN equals itself."""
    return a.shape != b.shape or not torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x).view(torch.uint8)


def _kind(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def worst_row(
    case: Case,
    call: int,
    rank: int,
    y_TH: Tensor,
    everything: ExpertWeights,
    routing: tuple[Tensor, Tensor] | None = None,
) -> Row | None:
    """The row of y_TH furthest from the oracle, None without rows; `routing` (on the CPU) in place of the case's."""
    chosen = chosen_rows(len(y_TH), case.rows)
    if not len(chosen):
        return None
    ids_TK, weights_TK = (
        a[chosen] for a in routing or case.what_is_left(*case.routing(call, rank))
    )
    x_TH, got_TH = case.tokens_of(call, rank)[chosen], y_TH.cpu().double()[chosen]
    answer = oracle(x_TH, ids_TK, weights_TK, everything, torch.float64)
    error_T = relative_error(got_TH, answer.y_TH, answer.terms_T)
    t = int(error_T.argmax())
    h = int((got_TH[t] - answer.y_TH[t]).abs().argmax())  # NaN counts as the largest
    return Row(
        rank=rank,
        call=call,
        row=int(chosen[t]),
        expert=_suspect(x_TH[t], ids_TK[t], got_TH[t] - answer.y_TH[t], everything),
        ids=ids_TK[t].tolist(),
        column=h,
        got=float(got_TH[t, h]),
        wanted=float(answer.y_TH[t, h]),
        error=float(error_T[t]),
        tolerance=tolerance(case.dtype),
    )


def chosen_rows(tokens: int, limit: int | None) -> Tensor:
    """At most `limit` row numbers of [0, tokens), evenly spread, the first and the last among them; None for all."""
    if limit is None or tokens <= limit:
        return torch.arange(tokens)
    return torch.linspace(0, tokens - 1, limit).round().long().unique()


def _suspect(x_H: Tensor, ids_K: Tensor, off_H: Tensor, everything: ExpertWeights) -> int:
    """The expert whose output points most nearly along the error."""
    named = [e for e in dict.fromkeys(ids_K.tolist()) if 0 <= e < everything.experts]
    off_H = torch.nan_to_num(off_H, nan=1.0, posinf=1.0, neginf=-1.0)

    def alignment(expert: int) -> float:
        f_H = expert_output(x_H.double(), everything, expert)
        return float((f_H @ off_H).abs() / f_H.norm().clamp_min(1e-300))

    return max(named, key=alignment, default=-1)


def report(reports: Sequence[CaseReport]) -> str:
    """The verdict over all ranks in a few lines: the worst row of any rank, then every broken promise."""
    rows = [r.worst for r in reports if r.worst]
    worst = max(rows, key=lambda row: row.error, default=None)
    what = "{stage} on {ranks} ranks, {shape}, {dtype}, {device}".format(**reports[0].layer)
    lines = [f"{what}: {'right' if all(r.right for r in reports) else 'WRONG'}"]
    if worst is not None:
        lines.append(
            f"worst row: rank {worst.rank}, call {worst.call}, row {worst.row}, expert {worst.expert} of {worst.ids}; "
            f"column {worst.column} is {worst.got:.7g}, wanted {worst.wanted:.7g}; "
            f"error {worst.error:.2e} of the terms, tolerance {worst.tolerance:.2e}"
        )
    return "\n".join(lines + [problem for r in reports for problem in r.problems])
