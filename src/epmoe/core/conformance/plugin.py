"""Options and fixtures of the conformance suite; loaded by the repository's conftest and by `entry`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epmoe.core import registry
from epmoe.core.capabilities import Capabilities, Spec
from epmoe.core.cases import Case
from epmoe.core.conformance.record import Recorder
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.launch import RankPool
from epmoe.core.ranks.transport import check_ranks
from epmoe.core.verify import CaseReport, report, run_case

_SUITE = "epmoe.core.conformance."

# tests are imported into other modules; their assertions explain themselves all the same
pytest.register_assert_rewrite(
    *(f"{_SUITE}{path.stem}" for path in Path(__file__).parent.glob("test_*.py")),
    f"{_SUITE}exercise_checks",
)

NEEDS_CUDA = "needs a CUDA device: run `make test-gpu` on a machine that has one"

PAIRS = "pairs"

Check = Callable[[Case], list[CaseReport]]


def pytest_addoption(parser):
    group = parser.getgroup("epmoe", "the conformance suite of epmoe")
    group.addoption(
        "--stage",
        help="only this stage (name, bare name or number) or pair (exchange+experts); "
        f"{PAIRS}: all pairs that are not stages",
    )
    group.addoption("--ranks", type=int, default=4, help="the most ranks to use (4)")
    group.addoption("--device", default="cpu", help="cpu, cuda or auto (cpu)")
    group.addoption("--record", help="write what passed, skipped and failed to this JSON file")


def pytest_configure(config):
    _check_options(config)
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skips with its reason elsewhere")
    if config.getoption("--record"):
        recorder = Recorder(Path(config.getoption("--record")))
        config.pluginmanager.register(recorder, "epmoe-recorder")
    config.addinivalue_line(
        "markers", "large: many rows or calls; skips where kernels are interpreted"
    )


def _check_options(config) -> None:
    """Raise pytest.UsageError for an option that every test would trip over."""
    try:
        _wanted(config)
        check_ranks(config.getoption("--ranks"), config.getoption("--device"))
    except InputError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_generate_tests(metafunc):
    """A module with STAGE tests that one (or all pairs), any other module all registered stages (or --stage)."""
    if "stage" in metafunc.fixturenames:
        fixed = getattr(metafunc.module, "STAGE", None)
        metafunc.parametrize("stage", _named(fixed) if fixed else _wanted(metafunc.config))
    if "exercise" in metafunc.fixturenames:
        found = _exercises(Path(metafunc.module.__file__).parents[1] / "exercises")
        metafunc.parametrize("exercise", found, ids=[path.name for path in found])


def _exercises(folder: Path) -> list[Path]:
    from epmoe.core.conformance.exercise_checks import names

    return names(folder)


def pytest_collection_modifyitems(config, items):
    """Every (check, stage) once, and only what was asked for."""
    seen, kept, dropped = set(), [], []
    asked = config.getoption("--stage")
    wanted = set(_named(asked)) if asked else None
    for item in items:
        stage = getattr(item, "callspec", None) and item.callspec.params.get("stage")
        function = getattr(item, "function", None)
        if stage is None or not function.__module__.startswith(_SUITE):
            kept.append(item)
            continue
        key = (function.__module__, item.name)
        other = wanted is not None and stage not in wanted
        (dropped if other or key in seen else kept).append(item)
        seen.add(key)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def _wanted(config) -> list[str]:
    asked = config.getoption("--stage")
    return _named(asked) if asked else registry.names()


def _named(name: str) -> list[str]:
    return registry.pairs() if name == PAIRS else [registry.resolve(name)]


@pytest.fixture(scope="session")
def pool(request) -> Iterator[RankPool]:
    """Ranks for the whole session: --ranks of them on --device."""
    with _open_pool(request.config, request.config.getoption("--device")) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def gpu_pool(request) -> Iterator[RankPool]:
    """Ranks on CUDA devices, whatever --device says; several share one where there are too few."""
    if not torch.cuda.is_available():
        pytest.skip(NEEDS_CUDA)
    if request.config.getoption("--device") != "cpu":
        yield request.getfixturevalue("pool")
        return
    with _open_pool(request.config, "cuda") as ranks:
        yield ranks


def _open_pool(config, device: str) -> RankPool:
    opened = RankPool(config.getoption("--ranks"), device)
    recorder = config.pluginmanager.get_plugin("epmoe-recorder")
    if recorder is not None:
        recorder.where = opened.describe()
    return opened


@pytest.fixture
def capabilities(stage: str) -> Capabilities:
    """Of the stage under test; skips where it cannot be imported."""
    try:
        return registry.load(stage).capabilities
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.fixture
def interpreted(pool: RankPool, capabilities: Capabilities) -> bool:
    """Whether the stage's kernels run through an interpreter here, in ranks that were started for it."""
    return pool.choice.device_type == "cpu" and capabilities.interpreted_on_cpu


@pytest.fixture
def run(request, pool: RankPool, capabilities: Capabilities, interpreted: bool):
    """run(program, case, *args): the program on the case's ranks, by rank; skips what the stage does not offer."""
    if interpreted and request.node.get_closest_marker("large"):
        pytest.skip("kernels are interpreted on a CPU, this check is large: use --device cuda")

    def run(
        program: Callable[..., Any], case: Case, *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        skip_unless_served(pool, capabilities, case)
        return pool.run(program, case, *args, ranks=case.ranks, timeout=timeout)

    return run


@pytest.fixture
def gpu_run(gpu_pool: RankPool, capabilities: Capabilities) -> Callable[..., list[Any]]:
    """As `run`, on the GPU."""

    def run(
        program: Callable[..., Any], case: Case, *args: Any, timeout: float = 120.0
    ) -> list[Any]:
        skip_unless_served(gpu_pool, capabilities, case)
        return gpu_pool.run(program, case, *args, ranks=case.ranks, timeout=timeout)

    return run


@pytest.fixture
def gpu_check(gpu_run) -> Check:
    """As `check`, on the GPU."""
    return lambda case: judged(gpu_run(run_case, case))


@pytest.fixture
def check(run) -> Check:
    """check(case): values and promises on every rank, and the same collectives on all of them in every call."""

    def check(case: Case) -> list[CaseReport]:
        return judged(run(run_case, case))

    return check


def judged(reports: list[CaseReport]) -> list[CaseReport]:
    """Fail where a rank is wrong, where ranks communicated differently, or where rows were left out."""
    assert all(r.right for r in reports), report(reports)
    for calls in zip(*(r.calls for r in reports), strict=True):
        lists = [call.ledger["collectives"] for call in calls]
        assert all(one == lists[0] for one in lists), (
            f"call {calls[0].call}: collectives by rank {lists}"
        )
        # by all together: where rows are computed is the layer's own business
        done = sum(call.ledger["rows_computed"] for call in calls)
        assert done >= sum(call.rows_needed for call in calls), calls
    return reports


def skip_unless_served(pool: RankPool, capabilities: Capabilities, case: Case) -> None:
    """pytest.skip with the reasons where the pool is too small or the stage does not offer what the case needs."""
    if case.ranks > pool.ranks:
        pytest.skip(f"needs {case.ranks} ranks, this session has {pool.ranks}: raise --ranks")
    spec = Spec(
        dtype=case.dtype,
        device=pool.choice.device_type,
        transport=pool.choice.transport if case.ranks > 1 else "single",
        placement=case.placed().kind,
        tokens=case.max_tokens_per_rank,
        topk=case.shape.topk,
        experts=case.shape.experts,
        maskable=bool(case.gone),
    )
    if reasons := capabilities.reasons_against(spec):
        pytest.skip(f"not offered: {'; '.join(reasons)}")
