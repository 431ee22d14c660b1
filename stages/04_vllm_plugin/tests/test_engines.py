"""How the ranks of a run start and end; no vLLM needed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epmoe.core.errors import RankFailedError, RunTimeoutError, UnsupportedError
from epmoe.vllm_plugin import engines


def test_a_python_without_vllm_is_named(monkeypatch):
    monkeypatch.setattr(engines, "has_vllm", lambda python: False)
    with pytest.raises(UnsupportedError, match=r"no vLLM in .*setup_vllm_env.py"):
        engines.find_python()


def program(tmp_path, monkeypatch, text: str) -> dict:
    (tmp_path / "rank_program.py").write_text(text)
    return {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}


def test_a_rank_that_fails_is_quoted_and_the_others_end(tmp_path, monkeypatch):
    env = program(
        tmp_path,
        monkeypatch,
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no')\ntime.sleep(60)",
    )
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed:.*ValueError: no"):
        engines.run_ranks("rank_program", tmp_path, sys.executable, env, 2, 30, "two ranks")


def test_shared_memory_that_ranks_leave_behind_goes_with_them(tmp_path, monkeypatch):
    name = f"/dev/shm/test-{tmp_path.name}-cpushm_0"
    env = program(tmp_path, monkeypatch, f"open({name!r}, 'w').close()")
    engines.run_ranks("rank_program", tmp_path, sys.executable, env, 1, 30, "one rank")
    assert not Path(name).exists()


def test_shared_memory_of_another_run_stays(tmp_path, monkeypatch):
    """A process in a session of its own stands for a rank of a run that began meanwhile."""
    name, told = f"/dev/shm/-{tmp_path.name}-cpushm_0", tmp_path / "pid"
    other = "import mmap, time; f = open({0!r}, 'w+b'); f.truncate(64); m = mmap.mmap(f.fileno(), 64); f.close(); "
    other += "open({1!r}, 'w').close(); time.sleep(60)"
    text = "import os, subprocess, sys, time\n"
    text += f"code = {other.format(name, str(told.with_suffix('.on')))!r}\n"
    text += "process = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
    text += f"open({str(told)!r}, 'w').write(str(process.pid))\n"
    text += f"while not os.path.exists({str(told.with_suffix('.on'))!r}): time.sleep(0.05)\n"
    env = program(tmp_path, monkeypatch, text)
    try:
        engines.run_ranks("rank_program", tmp_path, sys.executable, env, 1, 30, "one rank")
        assert Path(name).exists()
    finally:
        os.kill(int(told.read_text()), signal.SIGKILL)
        Path(name).unlink(missing_ok=True)


def test_a_rank_that_hangs_is_ended(tmp_path, monkeypatch):
    """And says where it was."""
    text = "import time; from epmoe.core.ranks import stacks; stacks.tell_on_request()\n"
    text += (
        "def wait_for_ever():\n    print('waiting', flush=True); time.sleep(60)\nwait_for_ever()"
    )
    env = program(tmp_path, monkeypatch, text)
    with pytest.raises(RunTimeoutError, match=r"(?s)rank 0 said last:\nwaiting.* in wait_for_ever"):
        engines.run_ranks("rank_program", tmp_path, sys.executable, env, 1, 2, "one rank")
    left = subprocess.run(
        ["pgrep", "-f", f"{tmp_path}/job.json"], capture_output=True, text=True, check=False
    )
    assert left.stdout == ""


def wait_for(true, seconds=20.0):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def runs(pid: str) -> bool:
    """Whether it does; one that has ended and that nobody asked about yet does not."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have switched off
from epmoe.core import cli
from epmoe.vllm_plugin import compare
compare.tokenise = lambda model, prompts: [[1] for _ in prompts]
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("how", [(), ("--at-once", "--device", "cuda")], ids=["in turn", "at once"])
def test_an_interrupt_ends_the_ranks_and_removes_their_folder(tmp_path, tiny_model, how, number):
    """The ranks are a program that sleeps."""
    pids, left, python = tmp_path / "pids", tmp_path / "left", tmp_path / "python"
    left.mkdir()
    python.write_text(f"#!/bin/sh\n[ $1 = -c ] && exit 0\necho $$ >> {pids}\nexec sleep 100\n")
    python.chmod(0o755)
    words = ["vllm", "compare", "--model", tiny_model, "--stages", "native,02", *how]
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words, "--python", str(python)],
        env=os.environ | {"TMPDIR": str(left)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ranks = 2 if how else 1
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == ranks, 60)
        command.send_signal(number)
        code = command.wait(timeout=10)
    finally:
        command.kill()
        command.wait()
        alive = [pid for pid in pids.read_text().split() if runs(pid)]
        for pid in alive:
            os.kill(int(pid), signal.SIGKILL)
    assert not alive
    assert code == 143 if number == signal.SIGTERM else code != 0
    assert not list(left.glob("epmoe-*"))


def test_ranks_end_with_a_run_that_is_killed(tmp_path):
    rank = "import os, sys, time; from epmoe.vllm_plugin import engines\n"
    rank += f"engines.end_with(int(sys.argv[3])); open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    (tmp_path / "rank_program.py").write_text(rank + "time.sleep(100)")
    run = "import os, sys; from pathlib import Path; from epmoe.vllm_plugin import engines\n"
    run += "engines.run_ranks('rank_program', Path(sys.argv[1]), sys.executable, dict(os.environ), 1, 100, 'one')"
    parent = subprocess.Popen(
        [sys.executable, "-c", run, str(tmp_path)], env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = (tmp_path / "pid").read_text()
    assert runs(pid)
    parent.kill()
    parent.wait()
    wait_for(lambda: not runs(pid), 5)


def test_a_rank_whose_run_has_ended_already_ends(tmp_path):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    code = "import sys; from epmoe.vllm_plugin import engines; engines.end_with(int(sys.argv[1]))"
    late = subprocess.run([sys.executable, "-c", code, str(done.pid)], check=False)
    assert late.returncode == 1
