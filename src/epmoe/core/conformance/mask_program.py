"""Rank programs that mask ranks between calls.

Legend: T tokens, H hidden, K experts per token, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epmoe.core.cases import Case
from epmoe.core.conformance.program import caught, judge
from epmoe.core.graphs import GraphedCall
from epmoe.core.groups import EPGroup
from epmoe.core.split import Rows, SplitLayer
from epmoe.core.verify import Row, bring, build_case, differ


def come_and_go(
    group: EPGroup, case: Case, masks: Sequence[tuple[int, ...]], graphed: bool = False
) -> dict[str, Any]:
    """Call 0 of the case again and again, under one mask after the other, and without any at the end.

    Returns the worst row under each mask, whether the last call has the bits of the first, and what the layer says is
    gone. With `graphed` one capture is replayed.
    """
    layer = build_case(group, case)
    arguments = bring(group, case, 0)
    graph = GraphedCall(layer, case.max_tokens_per_rank) if graphed else None
    call: Callable[..., Tensor] = graph or layer
    first_TH = call(*arguments).clone()
    rows, gone = [], []
    for mask in masks:
        layer.mask_ranks(mask)
        gone.append(layer.describe()["gone"])
        rows.append(judge(replace(case, gone=mask), 0, group, call(*arguments)))
    layer.mask_ranks(())
    first_again = not differ(first_TH, call(*arguments))
    if graph is not None:
        graph.close()
    layer.close()
    return {"rows": rows, "first_again": first_again, "gone": gone}


def served(group: EPGroup, case: Case) -> list[int] | None:
    """How many assignments of call 0 arrive at each slot of this rank; None where the layer does not say."""
    layer = build_case(group, case)
    if not isinstance(layer, SplitLayer):
        layer.close()
        return None
    local, experts = len(case.placed().experts_of(group.rank)), layer.experts
    arrived_E = torch.zeros(local, dtype=torch.int64)

    def watched(rows: Rows) -> Tensor:
        slots_N = rows.slots_RJ.flatten().cpu()
        real_N = slots_N[(slots_N >= 0) & (slots_N < local)]
        arrived_E.add_(torch.bincount(real_N, minlength=local))
        return experts(rows)

    layer.experts = watched  # pyright: ignore[reportAttributeAccessIssue]
    layer(*bring(group, case, 0))
    layer.close()
    return arrived_E.tolist()


def mistakes(group: EPGroup, case: Case) -> tuple[dict[str, str], Row | None]:
    """The last rank masks something else than the others: what every rank says; then a right call's worst row."""
    layer = build_case(group, case)
    last = group.rank == group.size - 1
    wrong = {"unknown": (3,), "negative": (-1,), "all": (0, 1, 2), "differ": (2,)}
    said = {
        name: caught(lambda gone=gone: layer.mask_ranks(gone if last else (1,)))
        for name, gone in wrong.items()
    }
    row = judge(case, 0, group, layer(*bring(group, case, 0)))
    layer.close()
    return said, row


def refused(group: EPGroup, case: Case) -> str:
    """What a stage says that cannot be masked."""
    layer = build_case(group, case)
    said = caught(lambda: layer.mask_ranks((0,)))
    layer.close()
    return said
