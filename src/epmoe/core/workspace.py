"""Buffers that live as long as a model, shared by the layers that agree on everything that shapes them.

Forty layers run one after the other, so they can take turns with one set of buffers. Three things can go wrong, and
are ruled out here: layers that differ in a size never share (buffers are found by name, shape, dtype and device); two
calls in flight on different CUDA streams never meet in one buffer (the later call's stream waits for the earlier); and
a thread that calls while another one is inside is refused.

Buffers are made when a layer is built, outside of any CUDA graph capture: a buffer from a graph's private memory would
die with that graph. A capture itself waits for nothing and leaves nothing to wait for: its work runs in the replays.
Those of a `GraphedCall` are calls like any other; whoever replays a graph of their own keeps it apart from calls on
other streams.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from epmoe.core import ambient
from epmoe.core.ambient import building
from epmoe.core.errors import InputError

OPTION = {
    "workspace": "an epmoe.core.workspace.Workspace that several layers share; default: a private one"
}

Key = tuple[str, tuple[int, ...], torch.dtype, torch.device]


@dataclass
class Workspace:
    """A set of named buffers. Hand one to `build(..., workspace=...)` of every layer that may share it."""

    # not in repr: what a buffer holds differs between ranks, which compare the repr of their options
    _buffers: dict[Key, Tensor] = field(default_factory=dict, repr=False)
    _last: tuple[torch.cuda.Stream, Any] | None = field(default=None, repr=False)
    _inside: Any = field(default_factory=RLock, repr=False, compare=False)

    def buffer(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The buffer of that name, shape, dtype and device; made (uninitialised) when it is asked for first."""
        key = (name, shape, dtype, device)
        if key not in self._buffers:
            if ambient.capturing(device):
                raise InputError(
                    f"buffer {name} {shape} cannot be made in a graph capture: build the layer first"
                )
            with building():  # it outlives this call and its modes
                self._buffers[key] = torch.empty(shape, dtype=dtype, device=device)
        return self._buffers[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def turn(self, device: torch.device) -> "Turn":
        """One call, as a with-block: `enter` and, however it ends, `leave`."""
        return Turn(self, device)

    def enter(self, device: torch.device) -> None:
        """A call begins on the current stream: wait for the last call that used these buffers on another stream.

        Raises:
            InputError: a call of another thread is under way, and nothing has been done.
        """
        if not self._inside.acquire(False):
            raise InputError(
                "another thread is inside a call of a layer that shares this workspace: let the calls take turns, or "
                "build a layer with a workspace of its own for each thread"
            )
        try:
            self._wait_for_last(device)
        except BaseException:
            self._inside.release()
            raise

    def _wait_for_last(self, device: torch.device) -> None:
        if device.type != "cuda" or ambient.capturing(device) or self._last is None:
            return
        stream, done = self._last
        if stream != torch.cuda.current_stream(device):
            torch.cuda.current_stream(device).wait_event(done)

    def leave(self, device: torch.device) -> None:
        """A call has queued all its work on the current stream."""
        try:
            if device.type == "cuda" and not ambient.capturing(device):
                stream = torch.cuda.current_stream(device)
                self._last = (stream, stream.record_event())
        finally:
            self._inside.release()

    def clear(self) -> None:
        """Let the buffers go."""
        self._buffers.clear()
        self._last = None

    def __reduce__(self) -> tuple[type, tuple[object]]:
        """A copy has buffers of its own, and nobody is inside."""
        return Workspace, (self._buffers,)


class Turn:
    """A call that uses a workspace. A class, not a generator: it is on the way of every call."""

    __slots__ = ("_device", "_workspace")

    def __init__(self, workspace: Workspace, device: torch.device):
        self._workspace, self._device = workspace, device

    def __enter__(self) -> None:
        self._workspace.enter(self._device)

    def __exit__(self, *exception: object) -> None:
        self._workspace.leave(self._device)


def of_options(options: Mapping[str, object]) -> tuple[Workspace, bool]:
    """The workspace that a layer is to use, and whether it is the layer's own. Raises InputError for something else."""
    shared = options.get("workspace")
    if shared is None:
        return Workspace(), True
    if not isinstance(shared, Workspace):
        raise InputError(f"workspace={shared!r}: give an epmoe.core.workspace.Workspace")
    return shared, False
