"""Ranks are killed for real between calls; those that are left make smaller groups and go on with right values."""

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from epmoe.core import groups, registry
from epmoe.core.capabilities import Wishes
from epmoe.core.cases import Case
from epmoe.core.checks import ranks_to_mask
from epmoe.core.errors import DisagreementError, InputError, RankFailedError
from epmoe.core.faults import rebuild, regroup
from epmoe.core.groups import EPGroup
from epmoe.core.launch import RankPool
from epmoe.core.loopback import LoopbackGroup
from epmoe.core.shape import MoEShape
from epmoe.core.verify import build_case
from tests import fault_ranks

SHAPE = MoEShape(hidden=16, intermediate=8, experts=6, topk=2)
HOMES = ((0, 1, 2, 3), (0,), (1, 2), (1, 3), (2,), (0, 1))
DEATHS = (0, 2, 3)  # the first rank, one in the middle, the last: of four, one is left
STAGES = registry.names()
LIMIT = 200.0  # seconds for everything


def case_of(stage: str) -> Case:
    lost = "renormalise" if stage == STAGES[1] else "drop"
    placement = "contiguous" if stage == STAGES[0] else HOMES
    return Case(stage=stage, shape=SHAPE, tokens=((3, 2, 0, 4),), placement=placement, lost=lost)


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Iterator[dict[int, list[fault_ranks.Step]]]:
    """What every rank reported, by rank; the processes are ended whatever happens."""
    cases = [case_of(stage) for stage in STAGES]
    folder = str(tmp_path_factory.mktemp("faults"))
    spawn = multiprocessing.get_context("spawn")
    ranks = [Rank(spawn, rank, folder, cases) for rank in range(4)]
    deadline = time.monotonic() + LIMIT
    try:
        yield {rank.number: rank.hear(deadline) for rank in ranks}
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


class Rank:
    """One process and what it says."""

    def __init__(self, spawn, number: int, folder: str, cases: list[Case]):
        self.number = number
        self.conn, theirs = spawn.Pipe(duplex=False)
        arguments = (number, folder, cases, DEATHS, theirs)
        self.process = spawn.Process(target=fault_ranks.live, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, deadline: float) -> list[fault_ranks.Step]:
        said = []
        while self.conn.poll(max(0.0, deadline - time.monotonic())):
            try:
                said.append(self.conn.recv())
            except EOFError:  # dead, or done
                return [step for step in said if step != "done"]
        raise TimeoutError(f"rank {self.number} hangs after {said}")


def test_everybody_lives_as_long_as_it_should(steps):
    assert {rank: len(said) for rank, said in steps.items()} == {0: 0, 1: 3, 2: 1, 3: 2}
    assert [step.ranks for step in steps[1]] == [3, 2, 1]


def test_survivors_are_woken(steps):
    """Who waits for the dead gets an error that says so, long before the time limit."""
    for said in steps.values():
        for step in said:
            assert step.noticed, step
            assert step.waited < fault_ranks.TIMEOUT / 3, step


@pytest.mark.parametrize("death", range(len(DEATHS)))
@pytest.mark.parametrize("rung", STAGES)
def test_survivors_go_on(steps, rung, death):
    """Replicas take over; what has no home left is dropped, or the rest renormalised."""
    survivors = [rank for rank in range(4) if rank not in DEATHS[: death + 1]]
    for rank in survivors:
        row = steps[rank][death].rows[STAGES.index(rung)]
        assert row is None or row.right, row


# ---- what is refused


def test_who_is_gone_cannot_regroup(tmp_path):
    group = EPGroup(1, 3, groups.single().device, "gloo", owns_process_group=True)
    for gone, message in (
        ([1], "this is rank 1, which is said to be gone"),
        ([3], "rank 3 cannot be gone"),
        ([0, 1, 2], "all 3 ranks are gone"),
    ):
        with pytest.raises(InputError, match=message):
            regroup(group, gone, tmp_path / "new")


def test_a_joined_group_is_its_makers(tmp_path):
    group = EPGroup(0, 2, groups.single().device, "gloo")
    with pytest.raises(InputError, match="was joined: let its maker"):
        regroup(group, [1], tmp_path / "new")


def disagree(group: EPGroup, folder: str) -> tuple[str, str]:
    """Ranks 1 and 2 believe that 0 has died, 0 believes that 1 has. Before, 0 goes to a place where nobody comes.

    What both attempts end with.
    """
    told = Path(folder) / "told"
    if group.rank == 0:
        lonely = attempt(group, [1], f"{folder}/lonely", 3)
        found = attempt(group, [1], f"{folder}/new", 30)
        told.touch()
        return lonely, found
    return "", attempt(group, [0], f"{folder}/new", 30, told)


def attempt(
    group: EPGroup, gone: list[int], where: str, timeout: float, until: Path | None = None
) -> str:
    """Regroup, and keep the new group until that file is there: the place of a group is gone when the group is."""
    try:
        smaller = regroup(group, gone, where, timeout=timeout)
    except (DisagreementError, RankFailedError) as error:
        return f"{type(error).__name__}: {error}"
    met = smaller.all_gather_ints([group.rank])
    deadline = time.monotonic() + timeout
    while until is not None and not until.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    smaller.close()
    return str(met)


def test_survivors_must_meet_and_agree_who_has_died(tmp_path):
    """Who waits in vain is told at the time limit, and may try again; who believes other things, at once."""
    with RankPool(3, "cpu") as pool:
        (lonely, zero), (_, one), (_, two) = pool.run(disagree, str(tmp_path), timeout=60)
    assert lonely.startswith("RankFailedError: ranks [0, 2] did not all meet at"), lonely
    assert zero == ("DisagreementError: ranks disagree about who is gone: 2 says [0], 0 says [1]")
    assert one == two == "[[1], [2]]"


def test_rebuilt_layers_keep_their_rules_and_masks():
    """Of ranks 0 to 3, 1 has died and 2 is masked: 2 is number 1 now, and still masked."""
    case = Case(stage="02", shape=SHAPE, tokens=((2,) * 4,), placement=HOMES, lost="renormalise")
    layer = build_case(LoopbackGroup(0, 4, "cpu"), case)
    layer.mask_ranks([2])
    rebuilt = rebuild(layer, [1], LoopbackGroup(0, 3, "cpu"))
    assert layer.closed
    assert (rebuilt.spec.lost, rebuilt.spec.overflow) == ("renormalise", "rounds")
    assert rebuilt.spec.placement == case.placed().without([1])
    assert rebuilt.spec.weights is layer.spec.weights
    assert rebuilt.spec.tables.gone == (1,)


def test_rebuilt_layers_keep_their_wishes():
    layer = build_case(LoopbackGroup(0, 2, "cpu"), Case(stage="02", shape=SHAPE, tokens=((1, 1),)))
    layer.spec = replace(layer.spec, wishes=Wishes(maskable=True, memory=2**40))
    assert rebuild(layer, [1], LoopbackGroup(0, 1, "cpu")).spec.wishes == layer.spec.wishes


def test_no_masks_inside_a_capture():
    layer = build_case(LoopbackGroup(0, 2, "cpu"), Case(stage="02", shape=SHAPE, tokens=((1, 1),)))
    with pytest.raises(InputError, match="call it between replays"):
        ranks_to_mask(layer.spec, (1,), capturing=True)
    assert ranks_to_mask(layer.spec, (1,), capturing=False) == (1,)


# ---- ranks from something that can be read once


def test_a_generator_names_the_ranks_as_a_list_does():
    """Whoever checks a generator leaves nothing of it for whoever uses it: the opposite of what was asked."""
    case = Case(stage="02", shape=SHAPE, tokens=((1, 1, 1, 1),), placement=HOMES)
    layer = build_case(LoopbackGroup(0, 4, "cpu"), case)
    layer.mask_ranks(rank for rank in [2, 1, 2])
    assert layer.spec.tables.gone == (1, 2)
    layer.spec.tables.mask(iter([0]))
    assert layer.spec.tables.gone == (0,)
    placed = case.placed()
    assert placed.without(iter([1])) == placed.without([1])
    assert placed.owners_from(0, iter([1])) == placed.owners_from(0, [1])
    assert placed.slots_from(0, iter([1])) == placed.slots_from(0, [1])
    rebuilt = rebuild(layer, iter([1]), LoopbackGroup(0, 3, "cpu"))
    assert rebuilt.spec.placement == placed.without([1])
    assert rebuilt.spec.tables.gone == (0,)


def test_a_generator_can_say_who_is_gone(tmp_path):
    group = EPGroup(1, 3, groups.single().device, "gloo", owns_process_group=True)
    with pytest.raises(InputError, match=r"said to be gone: \[0, 1\]"):
        regroup(group, iter([1, 0]), tmp_path / "new")


def test_a_layer_outlives_a_rebuild_that_is_refused():
    layer = build_case(LoopbackGroup(0, 2, "cpu"), Case(stage="02", shape=SHAPE, tokens=((1, 1),)))
    with pytest.raises(InputError, match="rank 2 cannot be gone"):
        rebuild(layer, [2], LoopbackGroup(0, 1, "cpu"))
    assert not layer.closed


def test_a_closed_layer_is_not_masked():
    layer = build_case(LoopbackGroup(0, 2, "cpu"), Case(stage="02", shape=SHAPE, tokens=((1, 1),)))
    layer.close()
    with pytest.raises(InputError, match="closed: build a new one"):
        layer.mask_ranks([1])
    assert layer.spec.tables.gone == ()
