"""Two threads in one workspace: the second is refused, and let in once the first call has ended, however it did."""

import pickle
import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from epmoe.core import ambient, groups
from epmoe.core.cases import Case
from epmoe.core.errors import InputError
from epmoe.core.shape import MoEShape
from epmoe.core.verify import bring, build_case
from epmoe.core.workspace import Workspace

CPU = torch.device("cpu")
SMALL = Case(
    stage="02",
    shape=MoEShape(hidden=64, intermediate=96, experts=8, topk=2),
    tokens=((8,),),
)


class Stream:
    """A CUDA stream that does nothing; two of them are never equal."""

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> object:
        return object()


def elsewhere(function: Callable[[], object]) -> str:
    """What another thread says when it calls `function`; "" for nothing."""
    said = []

    def attempt() -> None:
        try:
            function()
        except InputError as error:
            said.append(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return "".join(said)


def test_another_thread_is_refused_until_a_call_is_over():
    workspace = Workspace()

    def call() -> None:
        with workspace.turn(CPU):
            pass

    with workspace.turn(CPU):
        assert "another thread is inside a call" in elsewhere(call)
        with workspace.turn(CPU):  # its own thread is in order with itself
            pass
        assert "another thread is inside a call" in elsewhere(call)
    assert elsewhere(call) == ""


@pytest.mark.parametrize("failing", ["wait_event", "record_event"])
def test_a_stream_that_fails_lets_others_in(monkeypatch, failing):
    """The call has failed, and the next one may try."""

    def broken(self, *args):
        raise RuntimeError("broken stream")

    workspace, device = Workspace(), torch.device("cuda", 0)
    monkeypatch.setattr(ambient, "capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())

    def call() -> None:
        with workspace.turn(device):
            pass

    call()
    monkeypatch.setattr(Stream, failing, broken)
    with pytest.raises(RuntimeError, match="broken stream"):
        call()
    assert elsewhere(lambda: workspace.enter(CPU)) == ""


@pytest.mark.parametrize("together", [True, False], ids=["shared", "one_layer"])
def test_two_threads_never_meet_in_the_buffers_of_layers(monkeypatch, together):
    """Each would overwrite what the other has packed: numbers that are wrong, and no error."""
    workspace = Workspace()
    case = replace(SMALL, options={"workspace": workspace})
    first: Any = build_case(groups.single(), case)
    second = build_case(groups.single(), case) if together else first
    said, arguments = [], bring(groups.single(), case, 0)
    inside = type(first.experts).__call__

    def meanwhile(self, rows):
        if threading.current_thread() is threading.main_thread():
            said.append(elsewhere(lambda: second(*arguments)))
        return inside(self, rows)

    wanted_TH = first(*arguments)
    monkeypatch.setattr(type(first.experts), "__call__", meanwhile)
    assert torch.equal(first(*arguments), wanted_TH)
    assert "another thread is inside a call" in said[0]
    assert elsewhere(lambda: second(*arguments)) == ""


@pytest.mark.parametrize("by", ["ids", "logits"])
def test_a_call_that_fails_lets_others_in(monkeypatch, by):
    case = replace(SMALL, stage="fused_capacity+loop")
    layer: Any = build_case(groups.single(), case)
    x_TH, ids_TK, weights_TK = bring(groups.single(), case, 0)

    def call():
        if by == "ids":
            return layer(x_TH, ids_TK, weights_TK)
        return layer.from_logits(x_TH, torch.zeros(8, 8))

    def broken(self, rows):
        raise ZeroDivisionError

    monkeypatch.setattr(type(layer.experts), "__call__", broken)
    with pytest.raises(ZeroDivisionError):
        call()
    monkeypatch.undo()
    assert elsewhere(call) == ""


def test_a_copied_workspace_is_another():
    workspace = Workspace()
    workspace.buffer("send", (2,), torch.float32, CPU).fill_(7)
    with workspace.turn(CPU):
        for copied in (deepcopy(workspace), pickle.loads(pickle.dumps(workspace))):
            found = copied.buffer("send", (2,), torch.float32, CPU)
            assert (found == 7).all()
            found.zero_()
            assert elsewhere(lambda copied=copied: copied.enter(CPU)) == ""
    assert (workspace.buffer("send", (2,), torch.float32, CPU) == 7).all()
