"""A captured call, as far as no GPU is needed: what is refused before a capture, and what a replay is given.

The suite captures and replays on a GPU; here a graph is a stand-in that runs the layer on the fixed buffers.
"""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from epmoe.core import ambient, groups
from epmoe.core.cases import Case
from epmoe.core.errors import CapacityError, InputError, NotCapturableError
from epmoe.core.graphs import GraphedCall, _workspaces_of
from epmoe.core.shape import MoEShape
from epmoe.core.verify import bring, build_case, differ

SHAPE = MoEShape(hidden=16, intermediate=24, experts=8, topk=2)
CASE = Case(stage="02", shape=SHAPE, tokens=((8,), (3,), (0,), (5,)), capacity=8)


class PlayedGraph:
    """Runs what was captured, on the fixed buffers, into the fixed result."""

    def __init__(self, call: GraphedCall):
        self.call, self.replays, self.freed = call, 0, False

    def replay(self) -> None:
        self.replays += 1
        self.call.y_TH.copy_(self.call._run())

    def reset(self) -> None:
        self.freed = True


@pytest.fixture
def graphed(monkeypatch):
    """A GraphedCall of 8 tokens of a layer on the CPU, around a played graph; fixed buffers start as NaN."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    call = object.__new__(GraphedCall)
    call.layers, call.tokens = (build_case(groups.single(), CASE),), 8
    call.device, call.workspaces = torch.device("cpu"), _workspaces_of(call.layers)
    call.x_TH, call.y_TH = (torch.full((8, SHAPE.hidden), torch.nan) for _ in range(2))
    call.ids_TK = torch.full((8, SHAPE.topk), 2**30, dtype=torch.int32)
    call.weights_TK = torch.full((8, SHAPE.topk), torch.nan)
    call.graph = PlayedGraph(call)
    yield call
    call.close()


def arguments(call: int) -> tuple[Tensor, Tensor, Tensor]:
    return bring(groups.single(), CASE, call)


# ---- life


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_a_group_ends_its_graphs_before_itself(graphed, monkeypatch, end):
    """NCCL waits for graphs that hold its collectives: a forgotten one would keep the program for ever."""
    order, group = [], groups.EPGroup(0, 2, torch.device("cpu"), "gloo", owns_process_group=True)
    graph = graphed.graph
    graph.reset = lambda: order.append("graph")
    group.graphs.add(graphed)
    monkeypatch.setattr(groups.EPGroup, "barrier", lambda self: None)
    monkeypatch.setattr(groups.dist, "destroy_process_group", lambda made: order.append("group"))
    monkeypatch.setattr(groups.pgs, "abort", lambda made: order.append("group"))
    getattr(group, end)()
    assert order == ["graph", "group"]
    with pytest.raises(InputError, match="closed"):
        graphed(*arguments(0))


def test_a_subgroups_graphs_end_with_the_group(graphed):
    whole = groups.EPGroup(0, 2, torch.device("cpu"), "gloo")
    whole.subgroup(1).graphs.add(graphed)
    played = graphed.graph
    whole.close()
    assert played.freed


# ---- replays


def test_replays_of_other_sizes_equal_eager_calls(graphed):
    """8, 3, 0, 5 and 8 tokens through one graph of 8: rows of larger, earlier calls do not come back."""
    for call in (0, 1, 2, 3, 0):
        eager_TH = graphed.layers[0](*arguments(call))
        y_TH = graphed(*arguments(call))
        assert not differ(y_TH, eager_TH)
        assert (graphed.ids_TK[len(y_TH) :] == -1).all()


def test_a_result_is_the_callers_own(graphed):
    first_TH = graphed(*arguments(0))
    kept_TH = first_TH.clone()
    graphed(*arguments(3))
    assert torch.equal(first_TH, kept_TH)
    first_TH.fill_(torch.nan)
    assert not graphed(*arguments(0)).isnan().any()


def test_wide_ids_do_not_wrap(graphed):
    """2**32 + 3 in int64 is no expert, and not expert 3 either in a replay."""
    x_TH, _, weights_TK = arguments(1)
    ids_TK = torch.tensor([[2**32 + 3, 1], [-(2**32), 2**62], [2, -(2**62) + 5]])
    assert not differ(
        graphed(x_TH, ids_TK, weights_TK), graphed.layers[0](x_TH, ids_TK, weights_TK)
    )


def test_too_many_tokens(graphed):
    x_TH, ids_TK, weights_TK = (torch.cat([a, a[:1]]) for a in arguments(0))
    with pytest.raises(CapacityError, match="T=9: the graph was captured for 8 tokens"):
        graphed(x_TH, ids_TK, weights_TK)
    assert graphed.graph.replays == 0


WRONG = {
    "one row of ids for all": (lambda x, ids, w: (x, ids[:1], w), "topk_ids has shape"),
    "one weight for all": (lambda x, ids, w: (x, ids, w[:, :1]), "topk_weights has shape"),
    "x of another dtype": (lambda x, ids, w: (x.double(), ids, w), "x is torch.float64"),
    "narrow x": (lambda x, ids, w: (x[:, :1], ids, w), "x has shape"),
    "short ids": (lambda x, ids, w: (x, ids.short(), w), "topk_ids are torch.int16"),
    "weights in half": (lambda x, ids, w: (x, ids, w.bfloat16()), "topk_weights are"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_arguments_that_a_copy_would_swallow(graphed, change, message):
    """Fixed buffers would take these, repeated or converted; a layer call refuses them, so a replay does."""
    with pytest.raises(InputError, match=message):
        graphed(*change(*arguments(1)))
    assert graphed.graph.replays == 0


def test_a_closed_graph(graphed):
    played = graphed.graph
    graphed.close()
    graphed.close()
    assert played.freed
    with pytest.raises(InputError, match="closed: capture a new one"):
        graphed(*arguments(1))


def test_a_closed_layer(graphed):
    """Its buffers are gone: a replay would write to memory that belongs to others by now."""
    graphed.layers[0].close()
    with pytest.raises(InputError, match="closed: capture a new one"):
        graphed(*arguments(1))
    assert graphed.graph.replays == 0


# ---- streams


class Stream:
    """A CUDA stream that tells a list what it is asked for."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} has queued {len(self.log)}")
        return f"{self.name}'s {len(self.log) - 1}"


def test_replays_and_calls_of_other_streams_wait_for_each_other(graphed, monkeypatch):
    """From the copy in to the clone out: a call on B begins after the replay on A, and a replay after that call."""
    log, current = [], {}
    monkeypatch.setattr(ambient, "capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current["stream"])
    replay = graphed.graph.replay
    monkeypatch.setattr(graphed.graph, "replay", lambda: log.append("replay") or replay())
    graphed.device, first, second = torch.device("cuda", 0), Stream("A", log), Stream("B", log)
    workspace = graphed.layers[0].workspace

    current["stream"] = first
    graphed(*arguments(1))
    assert log == ["replay", "A has queued 1"]
    current["stream"] = second
    with workspace.turn(graphed.device):  # what an eager call does
        log.append("call")
    assert log[2:] == ["B waits for A's 1", "call", "B has queued 4"]
    current["stream"] = first
    graphed(*arguments(1))
    assert log[5:] == ["A waits for B's 4", "replay", "A has queued 7"]


def test_one_turn_in_each_workspace(graphed):
    """Layers that share one take it once; a layer without any leaves the graph one of its own."""
    layer, other = graphed.layers[0], build_case(groups.single(), CASE)
    assert _workspaces_of((layer, other, layer)) == [layer.workspace, other.workspace]
    assert len(_workspaces_of((stand_in(),))) == 1


def test_another_thread_cannot_replay_meanwhile(graphed, monkeypatch):
    """It would copy its arguments over those that are being computed."""
    said, replay = [], graphed.graph.replay

    def attempt() -> None:
        with pytest.raises(InputError, match="another thread is inside a call") as refused:
            graphed(*arguments(3))
        said.append(refused)

    def meanwhile() -> None:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        replay()

    wanted_TH = graphed(*arguments(1))
    monkeypatch.setattr(graphed.graph, "replay", meanwhile)
    assert torch.equal(graphed(*arguments(1)), wanted_TH)
    assert len(said) == 1


# ---- before a capture


def stand_in(device: str = "cuda", limit: int = 8, capturable: bool = True) -> SimpleNamespace:
    """What a capture asks of a layer first."""
    spec = SimpleNamespace(
        device=torch.device(device), max_tokens_per_rank=limit, stage="01_variable_a2a"
    )
    return SimpleNamespace(
        spec=spec, capabilities=SimpleNamespace(graph_capturable=capturable), closed=False
    )


def test_a_layer_on_a_cpu_has_no_graphs():
    with pytest.raises(InputError, match="the layer is on cpu: CUDA graphs need a CUDA device"):
        GraphedCall(build_case(groups.single(), CASE), 8)


@pytest.mark.parametrize("tokens", [0, -1, 9])
def test_sizes_that_no_graph_holds(tokens):
    with pytest.raises(CapacityError, match=f"tokens={tokens}: a graph holds 1 to .*=8 tokens"):
        GraphedCall(stand_in(), tokens)


def test_a_stage_that_waits_is_refused_before_the_capture():
    """7D: in words, before the stream is harmed."""
    with pytest.raises(NotCapturableError, match="01_variable_a2a waits for the host"):
        GraphedCall(stand_in(capturable=False), 8)


@pytest.mark.parametrize(
    ("second", "error"),
    [
        pytest.param(stand_in(capturable=False), NotCapturableError, id="waits"),
        pytest.param(stand_in(limit=4), CapacityError, id="smaller"),
        pytest.param(stand_in(device="cpu"), InputError, id="elsewhere"),
    ],
)
def test_every_layer_of_a_graph_is_looked_at(second, error):
    with pytest.raises(error):
        GraphedCall(stand_in(), 8, more=(second,))
