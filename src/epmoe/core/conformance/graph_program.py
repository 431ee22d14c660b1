"""Rank programs that capture calls in CUDA graphs and replay them.

Legend: T tokens, C tokens of a captured call, H hidden, K experts per token.
"""

import contextlib
import gc

import torch
from torch import Tensor

from epmoe.core.cases import Case
from epmoe.core.conformance.program import caught, judge
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer
from epmoe.core.verify import Row, bring, build_case


class Graph:
    """A captured call of C tokens: contents change, addresses do not. Rows past T have id -1 and NaN in x."""

    def __init__(self, layer: MoELayer, tokens: int):
        spec = layer.spec
        shape, device = spec.shape, spec.device
        self.x_TH = torch.zeros(tokens, shape.hidden, dtype=spec.dtype, device=device)
        self.ids_TK = torch.full((tokens, shape.topk), -1, dtype=torch.int32, device=device)
        self.weights_TK = torch.zeros(tokens, shape.topk, device=device)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # what compiles or allocates once does it here
            self._call(layer)
        torch.cuda.current_stream(device).wait_stream(stream)
        # NCCL's watchdog thread talks to the driver too: only this thread's calls belong to the capture
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.y_TH = self._call(layer)

    def _call(self, layer: MoELayer) -> Tensor:
        return layer(self.x_TH, self.ids_TK, self.weights_TK, max_tokens=len(self.x_TH))

    def replay(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        T = len(x_TH)
        self.x_TH.fill_(float("nan"))[:T] = x_TH
        self.ids_TK.fill_(-1)[:T] = ids_TK
        self.weights_TK.fill_(float("nan"))[:T] = weights_TK
        self.graph.replay()
        torch.cuda.synchronize(self.x_TH.device)
        return self.y_TH[:T].clone()


def graph_replays(group: EPGroup, case: Case) -> list[Row | None]:
    """One capture of C tokens, replayed for every call of the case: other contents, other T."""
    layer = build_case(group, case)
    graph = Graph(layer, case.max_tokens_per_rank)
    rows = [
        judge(case, call, group, graph.replay(*bring(group, case, call)))
        for call in range(len(case.tokens))
    ]
    del graph
    layer.close()
    return rows


def several_graphs(group: EPGroup, case: Case) -> list[Row | None]:
    """Graphs of 4 and 8 tokens: replay in turn, delete one, go on, delete all, run eagerly, capture again."""
    layer = build_case(group, case)
    arguments = bring(group, case, 0)
    small, large = Graph(layer, 4), Graph(layer, 8)
    gc.collect()
    results = [graph.replay(*arguments) for graph in (small, large, small)]
    del large
    gc.collect()
    results.append(small.replay(*arguments))
    del small
    gc.collect()
    results.append(layer(*arguments))
    results.append(Graph(layer, 4).replay(*arguments))
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
