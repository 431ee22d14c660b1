"""A layer call as a CUDA graph: captured once for one number of tokens, replayed with other tokens and other routing.

    call = GraphedCall(layer, tokens=8)           # collective: warms up, captures
    y_TH = call(x_TH, ids_TK, weights_TK)         # T <= 8; replays, one launch from the host
    call.close()                                  # or close the group: it ends its graphs first

A replay reads and writes fixed buffers, so a call copies its arguments in and clones its result out. Fewer tokens than
captured are padded with rows that name no expert: they are not routed, not counted and not computed.

A replay takes its turn in the workspaces of its layers, as an eager call does: from the copy in to the clone out, it
meets no call of another stream, eager or replayed, in their buffers or in its own.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from epmoe.core.checks import check_capturable, problem_with_call
from epmoe.core.errors import CapacityError, InputError
from epmoe.core.ids import clamped
from epmoe.core.layer import MoELayer
from epmoe.core.phases import phase
from epmoe.core.split import SplitLayer
from epmoe.core.workspace import Workspace

WARMUP_CALLS = 2  # before a capture, on its stream: libraries allocate and kernels compile outside of the graph


class GraphedCall:
    """One captured size of one layer (or of several in a row, the output of each the input of the next)."""

    def __init__(self, layer: MoELayer, tokens: int, more: tuple[MoELayer, ...] = ()):
        self.layers, self.tokens = (layer, *more), tokens
        for one in self.layers:
            _check_layer(one, tokens)
        spec = layer.spec
        shape, device = spec.shape, spec.device
        self.device, self.workspaces = device, _workspaces_of(self.layers)
        self.x_TH = torch.zeros(tokens, shape.hidden, dtype=spec.dtype, device=device)
        self.ids_TK = torch.full((tokens, shape.topk), -1, dtype=torch.int32, device=device)
        self.weights_TK = torch.zeros(tokens, shape.topk, dtype=torch.float32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        spec.group.graphs.add(self)
        self.y_TH = self._capture(self.graph)

    def _capture(self, graph: torch.cuda.CUDAGraph) -> Tensor:
        stream = torch.cuda.Stream(self.x_TH.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_CALLS):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.layers[0].spec.group.barrier()  # no rank captures while another still compiles
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            return self._run()

    def _run(self) -> Tensor:
        x_TH = self.x_TH
        for layer in self.layers:
            x_TH = layer(x_TH, self.ids_TK, self.weights_TK, max_tokens=self.tokens)
        return x_TH

    def __call__(self, x_TH: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """Replay with these arguments, T up to `tokens`; the result is a copy. Collective.

        Raises InputError, before anything is replayed, for what a layer call refuses too; it reads no device value.
        """
        if self.graph is None or any(layer.closed for layer in self.layers):
            raise InputError("this graph or a layer in it is closed: capture a new one")
        count = len(x_TH)
        if count > self.tokens:
            raise CapacityError(f"T={count}: the graph was captured for {self.tokens} tokens")
        spec = self.layers[0].spec
        problem = problem_with_call(spec, x_TH, topk_ids_TK, topk_weights_TK, None, False)
        if problem is not None:  # a copy into fixed buffers would convert or repeat it silently
            raise problem
        with ExitStack() as turns:
            for workspace in self.workspaces:
                turns.enter_context(workspace.turn(self.device))
            self.x_TH[:count] = x_TH
            self.ids_TK[:count] = clamped(topk_ids_TK, spec.shape.experts)
            self.ids_TK[count:] = -1
            self.weights_TK[:count] = topk_weights_TK
            with phase("replay"):
                self.graph.replay()
            return self.y_TH[:count].clone()

    def close(self) -> None:
        """Destroy the graph, once no replay of it is under way."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.end()

    def end(self) -> None:
        """Destroy the graph without waiting: its group's end does, also where a replay waits for a rank that died."""
        if self.graph is not None:
            self.graph.reset()
            self.graph = None


def _workspaces_of(layers: Sequence[MoELayer]) -> list[Workspace]:
    """Each workspace of these layers once; at least one: where they have none, it orders the calls of this graph."""
    found = {id(one.workspace): one.workspace for one in layers if isinstance(one, SplitLayer)}
    return list(found.values()) or [Workspace()]


def _check_layer(layer: MoELayer, tokens: int) -> None:
    """Refuse in words what would otherwise break a capture that has begun."""
    spec = layer.spec
    if spec.device.type != "cuda":
        raise InputError(f"the layer is on {spec.device}: CUDA graphs need a CUDA device")
    if not 1 <= tokens <= spec.max_tokens_per_rank:
        raise CapacityError(
            f"tokens={tokens}: a graph holds 1 to max_tokens_per_rank={spec.max_tokens_per_rank} tokens"
        )
    check_capturable(spec.stage, layer.capabilities)
