"""The same launch call under torchrun: ranks exist already, results are gathered, failures end everyone."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.timeout(120)


def _torchrun(tmp_path, body):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(body))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)


def test_launch_runs_on_the_ranks_that_exist_and_gathers_results(tmp_path):
    done = _torchrun(
        tmp_path,
        """
        import os, torch
        from epmoe.core.launch import launch

        def fn(group, offset):
            x = torch.full((1, 2), float(group.rank))
            out = torch.empty(group.size, 2)
            group.all_gather(out, x)
            return group.rank + offset, out[:, 0].tolist()

        first = launch(fn, 10, ranks=2, device="cpu")
        second = launch(fn, 20, ranks=4, device="cpu")
        os.write(1, f"{first} {second}\\n".encode())
        """,
    )
    assert done.returncode == 0, done.stderr
    both = "[(10, [0.0, 1.0]), (11, [0.0, 1.0])] [(20, [0.0, 1.0]), (21, [0.0, 1.0])]"
    assert done.stdout.splitlines() == [both, both]
    assert done.stderr.count("torchrun's world of 2 is used, not ranks=4") == 1


def test_a_rank_that_raises_ends_the_program_with_its_error(tmp_path):
    done = _torchrun(
        tmp_path,
        """
        from epmoe.core.launch import launch

        def fn(group):
            if group.rank == 1:
                raise KeyError("lost")
            group.barrier()

        launch(fn, ranks=2, device="cpu", timeout=60)
        """,
    )
    assert done.returncode != 0
    assert "KeyError: 'lost'" in done.stderr
    assert "raised on rank 1 of 2" in done.stderr


def test_a_hang_ends_by_its_limit_with_the_stack(tmp_path):
    done = _torchrun(
        tmp_path,
        """
        import time
        from epmoe.core.launch import launch

        def loses_itself(group):
            if group.rank == 1:
                time.sleep(100)

        launch(loses_itself, ranks=2, device="cpu", timeout=3)
        """,
    )
    assert done.returncode != 0
    assert "in loses_itself" in done.stderr


def test_a_command_runs_on_the_world_and_rank_0_speaks(tmp_path):
    """Two ranks, though four were asked for: one table, and both exit as the check says."""
    done = _torchrun(
        tmp_path,
        """
        import sys
        from epmoe.core.cli import main

        sys.argv = ["epmoe", "check", "01", "--ranks", "4", "--tokens", "3", "--draw", "uniform", "--seeds", "1"]
        main()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("uniform") == 1
    assert "2 ranks of torchrun's world on cpu over gloo" in done.stderr


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads have names in /proc")
@pytest.mark.parametrize("maker", ["torchrun's group", "the program's own group"])
def test_no_thread_of_gloo_outlives_the_program(tmp_path, maker):
    """One that lets go of its last tensor after Python has ended aborts the process, and does on busy cores."""
    own = maker == "the program's own group"
    done = _torchrun(
        tmp_path,
        f"""
        import atexit, os
        from pathlib import Path

        def gloo_threads():
            names = [name.read_text() for name in Path("/proc/self/task").glob("*/comm")]
            return sum("gloo" in name for name in names)

        atexit.register(lambda: os.write(1, f"{{gloo_threads()}} at the end\\n".encode()))
        import torch.distributed as dist
        from epmoe.core import groups
        from epmoe.core.launch import launch

        if {own}:
            dist.init_process_group("gloo")
        held = launch(lambda group: group.size, ranks=2, device="cpu")
        assert gloo_threads() > 0
        if {own}:
            dist.destroy_process_group()
        else:
            forgotten = groups.join(dist.group.WORLD, "cpu")
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 at the end"] * 2
