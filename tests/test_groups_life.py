"""EPGroup's life: subgroups, joined groups, closing, and where it refuses to start."""

import os
import threading

import pytest
import torch
import torch.distributed as dist

from epmoe.core import groups
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.launch import RankPool

RANKS = 3


@pytest.fixture(scope="module")
def pool():
    with RankPool(RANKS, device="cpu") as pool:
        yield pool


def _subgroups(group):
    two = group.subgroup(2)
    again, one = group.subgroup(2), group.subgroup(1)
    if two is None:
        return None, one is None
    return two.all_gather_ints([group.rank]), again is two, two.size, one is not None


def test_subgroup_is_the_first_ranks_and_cached(pool):
    got = pool.run(_subgroups)
    assert got[0] == ([[0], [1]], True, 2, True)
    assert got[1] == ([[0], [1]], True, 2, False)
    assert got[2] == (None, True)


def _joined(group):
    made = dist.new_group(list(range(group.size)))
    mine = groups.join(made, "cpu")
    sub = mine.subgroup(2)
    total = None if sub is None else sub.all_gather_ints([mine.rank])
    gathered = torch.empty(mine.size)
    mine.all_gather(gathered, torch.tensor([mine.rank + 1.0]))
    mine.close()
    after = torch.ones(1)
    dist.all_reduce(after, group=made)  # the maker's group still works
    return mine.transport, total, gathered.tolist(), after.item()


def test_a_joined_group_works_and_is_left_to_its_maker(pool):
    got = pool.run(_joined)
    assert got[0] == ("gloo", [[0], [1]], [1, 2, 3], 3.0)
    assert got[2][1] is None


def test_an_initialised_world_is_joined_and_not_initialised_again(pool, tmp_path):
    def again(group):
        groups.init(group.rank, group.size, "cpu", tmp_path / "store")

    with pytest.raises(InputError, match=r"use groups\.join"):
        pool.run(again)


def _cycles(_, rank, folder):
    """20 groups one after the other in one process; open files after the third and the last."""
    handles = []
    for cycle in range(20):
        group = groups.init(rank, 2, "cpu", os.path.join(folder, str(cycle)), timeout=30)
        group.subgroup(2)
        group.subgroup(1)
        group.barrier()
        group.close()
        group.close()
        handles.append(len(os.listdir("/proc/self/fd")))
    with pytest.raises(InputError, match="closed"):
        group.barrier()
    return handles[2], handles[-1], dist.is_initialized()


def test_twenty_cycles_of_init_and_close_leak_nothing(tmp_path):
    got = {}
    with RankPool(1, "cpu") as first, RankPool(1, "cpu") as second:

        def run(pool, rank):
            got[rank] = pool.run(_cycles, rank, str(tmp_path))[0]

        threads = [threading.Thread(target=run, args=a) for a in ((first, 0), (second, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rank in (0, 1):
        early, late, initialised = got[rank]
        assert late <= early
        assert not initialised


def test_bad_places_are_refused():
    with pytest.raises(InputError, match="rank 2 of 2"):
        groups.init(2, 2, "cpu", "unused")
    with pytest.raises(UnsupportedError, match="cpu and cuda"):
        groups.single("meta")
    with pytest.raises(InputError, match="1 to 1"):
        groups.single().subgroup(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without CUDA")
def test_cuda_without_a_device_says_so():
    with pytest.raises(UnsupportedError, match="no CUDA device is visible"):
        groups.single("cuda")


def test_from_torchrun_needs_its_variables(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="RANK"):
        groups.from_torchrun()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "01"[name == "WORLD_SIZE"])
    assert groups.from_torchrun("cpu").transport == "single"
