"""Rank programs in which the last rank is wrong, raises or dies."""

import os
from dataclasses import replace

import torch

from epmoe.core.cases import Case
from epmoe.core.conformance.program import caught, judge
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer, build
from epmoe.core.placement import contiguous
from epmoe.core.verify import Row, bring, build_case


def mistakes(group: EPGroup, case: Case) -> tuple[dict[str, str], Row | None]:
    """The last rank brings something wrong, the others do not: what every rank says, by mistake.

    The case must have check=True. Ends with a right call and its worst row.
    """
    layer = build_case(group, case)
    x_TH, ids_TK, weights_TK = bring(group, case, 0)
    T, E, C = len(x_TH), case.shape.experts, case.max_tokens_per_rank
    too_many = C + 1
    bad_id, low_id = ids_TK.clone(), ids_TK.clone()
    bad_id[0, 0], low_id[0, 0] = E + 5, -2
    other = torch.float16 if case.dtype is not torch.float16 else torch.float32
    wrong = {
        "dtype": (x_TH.to(other), ids_TK, weights_TK),
        "hidden": (x_TH.new_zeros(T, case.shape.hidden + 1), ids_TK, weights_TK),
        "topk": (x_TH, ids_TK.repeat(1, 2), weights_TK.repeat(1, 2)),
        "rows": (x_TH, ids_TK[:-1], weights_TK),
        "tokens": (
            x_TH.new_zeros(too_many, case.shape.hidden),
            ids_TK[:1].repeat(too_many, 1),
            weights_TK[:1].repeat(too_many, 1),
        ),
        "high id": (x_TH, bad_id, weights_TK),
        "low id": (x_TH, low_id, weights_TK),
        "ids dtype": (x_TH, ids_TK.to(torch.int16), weights_TK),
        "weights dtype": (x_TH, ids_TK, weights_TK.to(torch.bfloat16)),
    }
    last = group.rank == group.size - 1
    right = (x_TH, ids_TK, weights_TK)
    said = {
        name: caught(lambda arguments=arguments: layer(*(arguments if last else right)))
        for name, arguments in wrong.items()
    }
    row = judge(case, 0, group, layer(*right))
    layer.close()
    return said, row


def wrong_builds(group: EPGroup, case: Case) -> dict[str, str]:
    """The last rank builds something else: what every rank says, by mistake."""
    last = group.rank == group.size - 1
    wider = case.shape.with_(hidden=case.shape.hidden + 8)
    wrong = {
        "capacity": replace(case, capacity=case.max_tokens_per_rank + 1),
        "dtype": replace(case, dtype=torch.float16),
        "shape": replace(case, shape=wider),
        "check": replace(case, check=not case.check),
        "overflow": replace(case, overflow="rounds"),
        "option": replace(case, options={"no_such_option": 1}),
        "placement": replace(case, placement=tuple(case.placed().owners[::-1])),
        "lost": replace(case, lost="renormalise", overflow="raise"),
    }
    case = replace(case, overflow="raise")
    said = {
        name: caught(lambda other=other: build_case(group, other if last else case))
        for name, other in wrong.items()
    }
    said["weights"] = caught(lambda: _build_with_missing_expert(group, case, last))
    return said


def _build_with_missing_expert(group: EPGroup, case: Case, missing: bool) -> MoELayer:
    placement = contiguous(case.shape.experts, group.size)
    mine = placement.experts_of(group.rank)
    weights = case.weights_of(mine[1:] if missing else mine).to(group.device)
    return build(case.stage, case.shape, weights, placement, group, case.max_tokens_per_rank)


def fails_midway(group: EPGroup, case: Case, how: str) -> None:
    """The last rank raises or dies between two calls, the others go on calling."""
    layer = build_case(group, case)
    for _ in range(3):
        layer(*bring(group, case, 0))
    if group.rank == group.size - 1:
        if how == "dies":
            os._exit(7)
        raise ArithmeticError("the last rank gives up")
    for _ in range(3):
        layer(*bring(group, case, 0))
