"""Ranks that start, run what they are given, and end: nothing is left behind."""

import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from tests.processes import alive, pid_of

from epmoe.core.errors import InputError
from epmoe.core.launch import RankPool, launch

RANKS = 3
SECONDS = 20.0  # what "in seconds" means on a busy machine


@pytest.fixture(scope="module")
def pool():
    with RankPool(RANKS, device="cpu") as pool:
        yield pool


def _echo(group, a, b=0):
    return group.rank, group.size, a + b


def test_results_come_by_rank_and_ranks_are_reused(pool):
    assert pool.run(_echo, 3, b=4) == [(0, 3, 7), (1, 3, 7), (2, 3, 7)]
    assert pool.run(_echo, 1, ranks=2) == [(0, 2, 1), (1, 2, 1)]
    assert pool.run(_echo, 1, ranks=1) == [(0, 1, 1)]
    pids = pool.run(pid_of)
    assert len(set(pids)) == RANKS
    assert pool.run(pid_of) == pids


def test_tensors_travel_both_ways(pool):
    x = torch.arange(200_000.0)
    got = pool.run(lambda group, x: x + group.rank, x)
    assert all(torch.equal(y, x + rank) for rank, y in enumerate(got))


def test_launch_starts_and_ends_its_own_ranks():
    assert launch(_echo, 5, ranks=2, device="cpu", b=1) == [(0, 2, 6), (1, 2, 6)]


def test_threads_are_shared_out(pool):
    from epmoe.core.machine import cores

    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, cores() // RANKS)))
    assert pool.run(lambda group: torch.get_num_threads()) == [threads] * RANKS


def test_describe_says_what_and_why():
    with RankPool(4, device="cpu") as pool:
        assert pool.describe() == "4 ranks on cpu over gloo (cpu was asked for)"


@pytest.mark.parametrize(("ranks", "device"), [(0, "cpu"), (2, "tpu")])
def test_bad_arguments_are_refused_before_anything_starts(ranks, device):
    with pytest.raises(InputError, match=str(ranks) if ranks == 0 else device):
        RankPool(ranks, device)


def test_a_run_on_more_ranks_than_there_are_is_refused(pool):
    with pytest.raises(InputError, match="4 ranks of a pool of 3"):
        pool.run(_echo, 1, ranks=4)


# ---- nothing is left


def _children():
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


def test_twenty_pools_leak_no_process_file_or_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    counts = []
    for cycle in range(20):
        with RankPool(2, device="cpu") as pool:
            if cycle in (0, 19):
                pool.run(pid_of)
        counts.append((len(os.listdir("/proc/self/fd")), len(_children())))
        assert not list(tmp_path.iterdir())
    assert counts[-1] == counts[0]


def test_closing_twice_is_fine_and_running_afterwards_is_not():
    pool = RankPool(1, device="cpu")
    pool.close()
    pool.close()
    with pytest.raises(InputError, match="closed"):
        pool.run(_echo, 1)


def test_a_pool_survives_the_thread_that_made_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(RankPool(2, device="cpu")))
    thread.start()
    thread.join()
    with made[0] as pool:
        assert len(pool.run(pid_of)) == 2


def _script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_no_rank_outlives_a_killed_parent(tmp_path):
    script = _script(
        tmp_path,
        """
        import os, time
        from epmoe.core.launch import RankPool

        pool = RankPool(2, device="cpu")
        pids = pool.run(lambda group: os.getpid())
        print(*pids, pool._guardian.pid, pool._folder, flush=True)
        pool.run(lambda group: time.sleep(100))
        """,
    )
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    *pids, folder = parent.stdout.readline().split()
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    assert Path(folder).exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + SECONDS
    while any(alive(pid) for pid in pids) or Path(folder).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.stdout.close()


# ---- where functions come from


def test_a_script_may_launch_at_its_top_level_with_its_own_functions(tmp_path):
    script = _script(
        tmp_path,
        """
        from epmoe.core.launch import launch

        class Mine(Exception):
            pass

        OFFSET = 10

        def helper(x):
            return x + OFFSET

        def fn(group, x):
            if x < 0:
                raise Mine(f"x is {x}")
            return helper(x) + group.rank

        print(launch(fn, 1, ranks=2, device="cpu"))
        try:
            launch(fn, -1, ranks=2, device="cpu")
        except Mine as error:
            print("caught", error)
        """,
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[11, 12]\ncaught x is -1\n", done.stderr


def test_functions_of_a_module_that_no_rank_can_import_travel_by_value(pool, monkeypatch):
    module = types.ModuleType("loose_module_of_this_test")
    module.__file__ = "/nowhere/loose.py"
    exec("def fn(group):\n    return helper()\ndef helper():\n    return 42\n", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert pool.run(module.fn) == [42] * RANKS


def test_the_ranks_see_the_parents_path(monkeypatch, tmp_path):
    (tmp_path / "found_by_path.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)

    def fn(group):
        import found_by_path

        return found_by_path.VALUE

    assert launch(fn, ranks=1, device="cpu") == [7]


def test_a_script_that_forgets_to_close_leaves_nothing(tmp_path):
    script = _script(
        tmp_path,
        """
        import os
        from epmoe.core.launch import RankPool

        pool = RankPool(2, device="cpu")
        print(*pool.run(lambda group: os.getpid()), pool._guardian.pid, pool._folder, flush=True)
        """,
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    *pids, folder = done.stdout.split()
    assert (done.returncode, done.stderr, len(pids)) == (0, "", 3)
    assert not any(alive(pid) for pid in pids)
    assert not Path(folder).exists()
