"""L layer calls in a row on one draw, as one CUDA graph where the subject and the device allow it."""

from typing import Any

import torch
from torch import Tensor

from epmoe.core.bench.subjects import Subject

_WARMUPS = 2  # outside of the capture: libraries allocate, kernels compile, communicators connect


class Chain:
    """One draw of one subject. `run` queues all layers; `outputs` are y_TH of every layer."""

    def __init__(self, subject: Subject, draw: int, pool: Any = None):
        self.subject, self.draw = subject, draw
        self.device = subject.setting.device
        self._graph: torch.cuda.CUDAGraph | None = None
        with torch.no_grad():
            self.eager = [y.clone() for y in self._warm()]
            self.outputs = self.eager
            if self.graphed:
                self._graph = torch.cuda.CUDAGraph()
                self.outputs = self._capture(self._graph, pool)

    @property
    def graphed(self) -> bool:
        """True where a run is the replay of a graph."""
        return self.device.type == "cuda" and self.subject.graph

    def _warm(self) -> list[Tensor]:
        if self.device.type != "cuda":
            return self.subject.chain(self.draw)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        outputs: list[Tensor] = []
        with torch.cuda.stream(stream):
            for _ in range(_WARMUPS):
                outputs = self.subject.chain(self.draw)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize(self.device)
        return outputs

    def _capture(self, graph: torch.cuda.CUDAGraph, pool: Any) -> list[Tensor]:
        self.subject.setting.group.barrier()  # no rank captures while another still compiles
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return self.subject.chain(self.draw)

    def run(self) -> None:
        """Queue the chain once. Collective."""
        if self._graph is not None:
            self._graph.replay()
            return
        with torch.no_grad():
            self.outputs = self.subject.chain(self.draw)

    def poison(self) -> None:
        """A replay that writes nothing must not pass for one that wrote the right thing."""
        if self._graph is not None:
            for y_TH in self.outputs:
                y_TH.fill_(float("nan"))

    def close(self) -> None:
        """Destroy the graph, before the subject and its group are closed."""
        if self._graph is not None:
            torch.cuda.synchronize(self.device)
            self._graph.reset()
            self._graph = None
        self.outputs = self.eager = []
