"""Buffers that layers share: found by everything that shapes them, never made in a capture, never two calls in one."""

from dataclasses import replace

import pytest
import torch

from epmoe.core import ambient, groups
from epmoe.core.cases import Case
from epmoe.core.conformance.program import judge
from epmoe.core.errors import DisagreementError, InputError
from epmoe.core.groups import EPGroup
from epmoe.core.shape import MoEShape
from epmoe.core.verify import Row, bring, build_case, differ
from epmoe.core.workspace import Workspace

CPU = torch.device("cpu")
SMALL = Case(
    stage="02",
    shape=MoEShape(hidden=64, intermediate=96, experts=8, topk=2),
    tokens=((8, 2), (0, 3), (5, 8)),
)
LARGE = Case(
    stage="02",
    shape=MoEShape(hidden=128, intermediate=16, experts=6, topk=4),
    tokens=((32, 1), (7, 0), (20, 32)),
    seed=1,
)


def shared(case: Case, workspace: Workspace) -> Case:
    return replace(case, options={"workspace": workspace})


# ---- finding buffers


def test_a_buffer_is_made_once_and_found_again():
    workspace = Workspace()
    first = workspace.buffer("send", (4, 3), torch.float32, CPU)
    assert workspace.buffer("send", (4, 3), torch.float32, CPU) is first
    assert workspace.nbytes == 48


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(("recv", (4, 3), torch.float32), id="name"),
        pytest.param(("send", (3, 4), torch.float32), id="shape"),
        pytest.param(("send", (4, 3), torch.int32), id="dtype"),
        pytest.param(("send", (2, 3), torch.float32), id="fewer_rows"),
    ],
)
def test_what_shapes_a_buffer_tells_it_apart(other):
    workspace = Workspace()
    first = workspace.buffer("send", (4, 3), torch.float32, CPU)
    first.fill_(7)
    name, shape, dtype = other
    second = workspace.buffer(name, shape, dtype, CPU)
    second.fill_(1)
    assert (second.shape, second.dtype) == (shape, dtype)
    assert (first == 7).all()
    assert workspace.nbytes == first.nbytes + second.nbytes


def test_cleared_buffers_are_gone():
    workspace = Workspace()
    workspace.buffer("send", (4, 3), torch.float32, CPU).fill_(7)
    workspace.clear()
    assert workspace.nbytes == 0


def test_ranks_may_compare_workspaces_by_name():
    """Options are compared between ranks as text, which must not tell what a buffer holds."""
    empty, used = Workspace(), Workspace()
    used.buffer("send", (4, 3), torch.float32, CPU)
    assert repr(empty) == repr(used)


# ---- captures and streams, with CUDA's part played


class Stream:
    def __init__(self):
        self.waited = []

    def wait_event(self, event) -> None:
        self.waited.append(event)

    def record_event(self):
        return ("event of", self)


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda with a current stream and a capture that a test may set."""
    state = {"stream": Stream(), "capturing": False}
    monkeypatch.setattr(ambient, "capturing", lambda device: state["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state["stream"])
    return state


def test_no_buffer_is_made_in_a_capture(cuda, monkeypatch):
    """Its memory would be the graph's; one that is there already is found."""
    workspace, device = Workspace(), torch.device("cuda", 0)
    kept = torch.zeros(2, 3)
    with monkeypatch.context() as before:
        before.setattr(torch, "empty", lambda *args, **kwargs: kept)
        assert workspace.buffer("send", (2, 3), torch.float32, device) is kept
    cuda["capturing"] = True
    assert workspace.buffer("send", (2, 3), torch.float32, device) is kept
    with pytest.raises(InputError, match=r"recv \(2, 3\) cannot be made in a graph capture"):
        workspace.buffer("recv", (2, 3), torch.float32, device)
    assert workspace.nbytes == kept.nbytes


def test_a_call_on_another_stream_waits_for_the_last(cuda):
    workspace, device, first, second = Workspace(), torch.device("cuda", 0), Stream(), Stream()
    cuda["stream"] = first
    workspace.enter(device)  # nobody was here before
    workspace.leave(device)
    workspace.enter(device)  # a stream is in order with itself
    workspace.leave(device)
    assert first.waited == []
    cuda["stream"] = second
    workspace.enter(device)
    workspace.leave(device)
    assert second.waited == [("event of", first)]
    cuda["stream"] = first
    workspace.enter(device)
    assert first.waited == [("event of", second)]


def test_a_capture_waits_for_nothing_outside(cuda):
    """An event from outside would break the capture, one from inside would mean nothing after it."""
    workspace, device = Workspace(), torch.device("cuda", 0)
    workspace.enter(device)
    workspace.leave(device)
    cuda["stream"], cuda["capturing"] = Stream(), True
    workspace.enter(device)
    workspace.leave(device)
    assert cuda["stream"].waited == []
    cuda["capturing"] = False
    workspace.enter(device)
    assert len(cuda["stream"].waited) == 1  # still for the eager call before the capture


# ---- layers


def test_another_object_is_no_workspace():
    with pytest.raises(InputError, match=r"give an epmoe\.core\.workspace\.Workspace"):
        build_case(groups.single(), replace(SMALL, tokens=((3,),), options={"workspace": {}}))


def interleaved(group: EPGroup, cases: list[Case]) -> tuple[list[Row | None], list[bool], int, int]:
    """Layers over one workspace, called in turn: worst rows; other bits than alone? Bytes together and alone."""
    workspace = Workspace()
    layers = [build_case(group, shared(case, workspace)) for case in cases]
    results = [
        [layer(*bring(group, case, call)) for case, layer in zip(cases, layers, strict=True)]
        for call in range(len(cases[0].tokens))
    ]
    together, alone, rows, unlike = workspace.nbytes, 0, [], []
    for number, case in enumerate(cases):
        private = build_case(group, case)
        alone += private.workspace.nbytes
        for call, y in enumerate(results):
            rows.append(judge(case, call, group, y[number]))
            unlike.append(differ(y[number], private(*bring(group, case, call))))
        private.close()
        layers[number].close()
    return rows, unlike, together, alone


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["small_first", "large_first"])
def test_14B_unequal_layers_share_nothing(pool, order):
    """14B: other H, K, E and C over one workspace, in both orders, in turn: right, and as many bytes as alone."""
    cases = [(SMALL, LARGE)[i] for i in order]
    for rows, unlike, together, alone in pool.run(interleaved, cases, ranks=2):
        assert all(row is None or row.right for row in rows), rows
        assert not any(unlike)
        assert together == alone


def test_14B_equal_layers_take_turns(pool):
    """Other weights, the same sizes: one set of buffers, the bits of layers that have their own."""
    cases = [SMALL, replace(SMALL, seed=5), replace(SMALL, kind="masked", seed=6)]
    for rows, unlike, together, alone in pool.run(interleaved, cases, ranks=2):
        assert all(row is None or row.right for row in rows), rows
        assert not any(unlike)
        assert together * 3 == alone


def too_many(group: EPGroup, case: Case) -> Row | None:
    layer = build_case(group, shared(case, Workspace()))
    return judge(case, 0, group, layer(*bring(group, case, 0)))


def test_14B_over_the_maximum_is_refused_on_all_ranks(pool):
    case = replace(SMALL, tokens=((9, 2),), capacity=8, overflow="raise", check=True)
    with pytest.raises(InputError, match="rank 0: 9 tokens on a rank"):
        pool.run(too_many, case, ranks=2)


def model(group: EPGroup, case: Case, layers: int) -> list[int]:
    """Bytes of the workspace as layers join it, after a call of each, and after all are closed."""
    workspace, sizes = Workspace(), set()
    built = []
    for _ in range(layers):
        built.append(build_case(group, shared(case, workspace)))
        sizes.add(workspace.nbytes)
    for layer in built:
        layer(*bring(group, case, 0))
        sizes.add(workspace.nbytes)
    for layer in built:
        layer.close()
    return [*sizes, workspace.nbytes]


def test_48_layers_share_one_workspace(pool):
    """The 48th layer takes no byte more than the first; closing layers leaves what is the maker's to clear."""
    for sizes in pool.run(model, SMALL, 48, ranks=2):
        assert len(sizes) == 2
        assert sizes[0] == sizes[1] == 2 * 8 * (2 * 288 + 4 * 64)  # 256 + 20 bytes a row, padded


def test_a_layer_clears_its_own_workspace():
    layer = build_case(groups.single(), replace(SMALL, tokens=((8,),)))
    assert layer.describe()["workspace_bytes"] == 8 * (2 * 288 + 4 * 64)
    layer.close()
    assert layer.workspace.nbytes == 0


def unequal_options(group: EPGroup, case: Case) -> None:
    options = {"workspace": Workspace()} if group.rank == 0 else {}
    build_case(group, replace(case, options=options))


def test_ranks_share_alike(pool):
    """One rank with a shared workspace and one without are not built alike: all ranks say so."""
    with pytest.raises(DisagreementError, match="options must be the same on all ranks"):
        pool.run(unequal_options, SMALL, ranks=2)
