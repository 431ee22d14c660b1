"""Rank programs that capture calls in CUDA graphs and replay them.

Legend: T tokens, C tokens of a captured call, H hidden, K experts per token.
"""

import contextlib
import gc

import torch
from torch import Tensor

from epmoe.core.cases import Case
from epmoe.core.conformance.program import caught, judge
from epmoe.core.graphs import GraphedCall
from epmoe.core.groups import EPGroup
from epmoe.core.verify import Row, bring, build_case


def replay(graph: GraphedCall, arguments: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """With T rows of a graph of more: what lies past T is inert, NaN included."""
    graph.x_TH.fill_(float("nan"))
    graph.weights_TK.fill_(float("nan"))
    return graph(*arguments)


def graph_replays(group: EPGroup, case: Case) -> list[Row | None]:
    """One capture of C tokens, replayed for every call of the case: other contents, other T."""
    layer = build_case(group, case)
    graph = GraphedCall(layer, case.max_tokens_per_rank)
    rows = [
        judge(case, call, group, replay(graph, bring(group, case, call)))
        for call in range(len(case.tokens))
    ]
    graph.close()
    layer.close()
    return rows


def several_graphs(group: EPGroup, case: Case) -> list[Row | None]:
    """Graphs of 4 and 8 tokens: replay in turn, delete one, go on, delete all, run eagerly, capture again."""
    layer = build_case(group, case)
    arguments = bring(group, case, 0)
    small, large = GraphedCall(layer, 4), GraphedCall(layer, 8)
    gc.collect()
    results = [replay(graph, arguments) for graph in (small, large, small)]
    large.close()
    del large
    gc.collect()
    results.append(replay(small, arguments))
    small.close()
    del small
    gc.collect()
    results.append(layer(*arguments))
    again = GraphedCall(layer, 4)
    results.append(replay(again, arguments))
    again.close()
    layer.close()
    return [judge(case, 0, group, y_TH) for y_TH in results]


def real_refused_capture(group: EPGroup, case: Case) -> dict[str, object]:
    """Capture a stage that cannot be: what it says, and the next eager call on the same stream."""
    layer = build_case(group, case)
    said = ""
    capture = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with contextlib.suppress(RuntimeError), capture:  # an abandoned capture may itself complain
        said = caught(lambda: layer(*bring_to_device(group, case)))
    row = judge(case, 0, group, layer(*bring(group, case, 0)))
    layer.close()
    return {"said": said, "row": row}


def bring_to_device(group: EPGroup, case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros of the right sizes, made on the device: copies from the host have no place in a capture."""
    T, H, K = case.max_tokens_per_rank, case.shape.hidden, case.shape.topk
    x_TH = torch.zeros(T, H, dtype=case.dtype, device=group.device)
    ids_TK = torch.zeros(T, K, dtype=torch.int32, device=group.device)
    return x_TH, ids_TK, torch.zeros(T, K, device=group.device)
