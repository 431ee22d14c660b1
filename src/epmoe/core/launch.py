"""Start ranks on this machine and run functions on them.

    from epmoe.core.launch import launch, RankPool

    results = launch(fn, 3, ranks=4)              # fn(group, 3) on four ranks, results by rank
    with RankPool(4) as pool:                     # ranks start once, runs are quick
        print(pool.describe())
        results = pool.run(fn, 3, timeout=30)

Works at the top level of a script or notebook, with functions defined there: ranks are started as programs of their
own, and functions travel by value. Every run has a time limit; no process outlives the pool, nor the pool's process.
"""

import contextlib
import importlib.machinery
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from epmoe.core.errors import InputError
from epmoe.core.machine import cores
from epmoe.core.ranks import gpu_sharing, guardian
from epmoe.core.ranks.rank_process import RankProcess
from epmoe.core.ranks.run_end import RunEnd, collect
from epmoe.core.ranks.time_limits import check_seconds
from epmoe.core.ranks.torchrun import WorldRanks, run_under_torchrun, under_torchrun
from epmoe.core.ranks.transport import choose_here

_log = logging.getLogger(__name__)
_CLOSE_PATIENCE = 5.0  # seconds a sound rank gets to close its group


def launch(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    device: str = "auto",
    timeout: float = 120.0,
    transport: str | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run fn(group, *args, **kwargs) on `ranks` fresh ranks; its results by rank (tensors on the CPU).

    Under torchrun the ranks exist already: fn runs on this one, `ranks` gives way to the world's size, and every rank
    gets all results.

    Args:
        fn: called with an EPGroup first. Its result must pickle.
        ranks: how many processes.
        device: "auto", "cpu" or "cuda".
        timeout: seconds for the run, and again for the start.
        transport: None (see `transport.choose_transport`), "gloo" or "nccl".

    Raises:
        Exception: what fn raised on the rank that failed first.
        RankFailedError: a rank died.
        RunTimeoutError: the run took too long.
        InputError: before any rank starts, a wrong argument.
    """
    check_seconds("timeout", timeout)
    if under_torchrun():
        return run_under_torchrun(fn, args, kwargs, ranks, device, timeout)
    with RankPool(ranks, device, start_timeout=timeout, transport=transport) as pool:
        return pool.run(fn, *args, timeout=timeout, **kwargs)


def open_ranks(ranks: int, device: str = "auto") -> "RankPool | WorldRanks":
    """Ranks to run programs on: torchrun's world where there is one (whatever its size), else a pool of `ranks`."""
    return WorldRanks(ranks, device) if under_torchrun() else RankPool(ranks, device)


class RankPool:
    """Ranks that start once and serve many runs; after a failure that may leave them out of step they start afresh.

    The processes start at once and in the background; the first `run` waits for them, `start_timeout` seconds at most.
    """

    def __init__(
        self,
        ranks: int,
        device: str = "auto",
        start_timeout: float = 120.0,
        transport: str | None = None,
    ):
        check_seconds("start_timeout", start_timeout)
        self.choice = choose_here(ranks, device, transport)
        self.ranks = ranks
        self._start_timeout = start_timeout
        self._generations = itertools.count()
        self._busy = threading.Lock()
        self._processes: list[RankProcess] = []
        self._ready = self._closed = False
        self._service = ""
        self._folder = Path(tempfile.mkdtemp(prefix="epmoe-"))
        self._guardian = _start_guardian(self._folder)
        self._finalizer = weakref.finalize(self, _stop_guardian, self._guardian, self._folder)
        self._environment = {**os.environ, **gpu_sharing.preload(os.environ)}
        if self.choice.device_type == "cpu":
            # Triton decides when it is first imported whether it compiles or interprets kernels
            self._environment.setdefault("TRITON_INTERPRET", "1")
        if self.choice.shared:
            self._share_gpu()
        _log.log(logging.WARNING if self.choice.fallback else logging.INFO, self.describe())
        self._start()

    def describe(self) -> str:
        """One sentence: what was chosen, and why."""
        return f"{self.choice.reason}{self._service}"

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """fn(group, *args, **kwargs) on the first `ranks` ranks (default all); results by rank, as `launch`."""
        if self._closed:
            raise InputError("this pool was closed: make a new one")
        check_seconds("timeout", timeout)
        wanted = self.ranks if ranks is None else ranks
        if not 1 <= wanted <= self.ranks:
            raise InputError(
                f"run on {wanted} ranks of a pool of {self.ranks}: give 1 to {self.ranks}"
            )
        call = _pack_call(fn, args, kwargs)
        with self._busy:
            self._await_ready()
            members = self._processes[:wanted]
            for member in members:
                member.send_run(wanted, call)
            end = self._collect(members, timeout, "finished")
        return end.results()

    def close(self) -> None:
        """End the ranks and everything that was started for them. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for process in self._processes if self._ready else []:
            process.ask_to_leave()
        self._end_ranks(_CLOSE_PATIENCE if self._ready else 0.0)
        self._finalizer()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> None:
        rendezvous = self._folder / f"group{next(self._generations)}"
        environment = {"OMP_NUM_THREADS": str(max(1, cores() // self.ranks)), **self._environment}
        threads = int(environment["OMP_NUM_THREADS"])
        for rank in range(self.ranks):
            device = self.choice.device_of(rank)
            process = RankProcess(rank, self.ranks, device, rendezvous, threads, environment)
            self._processes.append(process)
            _tell(self._guardian, watch=process.process.pid)

    def _await_ready(self) -> None:
        if not self._processes:
            self._start()
        if not self._ready:
            self._collect(self._processes, self._start_timeout, "started").results()
            self._ready = True

    def _collect(self, members: list[RankProcess], timeout: float, goal: str) -> RunEnd:
        try:
            end = collect(members, timeout, goal)
        except (
            BaseException
        ):  # Ctrl-C or a test's time limit breaks in: no rank is left in the middle
            self._end_ranks()
            raise
        if not end.reusable:
            self._end_ranks()
        return end

    def _end_ranks(self, patience: float = 0.0) -> None:
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.end(deadline - time.monotonic())
            _tell(self._guardian, forget=process.process.pid)
        self._processes, self._ready = [], False

    def _share_gpu(self) -> None:
        """Have the multi-process service, one of our own unless one runs, and say in `describe` how it went."""
        self._environment = {**gpu_sharing.ENVIRONMENT, **self._environment}
        if gpu_sharing.service_running():
            self._service = " (multi-process service was on)"
            return
        if not gpu_sharing.service_available():
            self._service = (
                f" (no {gpu_sharing.SERVICE} here: ranks take turns, times mean nothing)"
            )
            return
        directories = gpu_sharing.service_directories(self._folder)
        _tell(self._guardian, quit=[gpu_sharing.SERVICE], env=directories)
        if gpu_sharing.start_service(directories):
            self._environment |= directories
            self._service = " (multi-process service on)"
        else:
            self._service = " (multi-process service did not start: ranks take turns)"


def _pack_call(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bytes:
    """By reference where a rank can import fn's module too; by value else (scripts, notebooks, loose test files)."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    by_value = module is not None and not _importable(module)
    if module is not None and by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    finally:
        if module is not None and by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    """Whether an import by name, in a process with our sys.path, finds this very file."""
    name, file = module.__name__, getattr(module, "__file__", None)
    if name == "__main__" or file is None:
        return True  # cloudpickle sends __main__ by value anyway; a builtin is everywhere
    try:
        # A fresh look: sys.modules would answer for modules that were loaded by path.
        spec = importlib.machinery.PathFinder.find_spec(name.split(".")[0], None)
        for depth in range(2, name.count(".") + 2):
            if spec is None or spec.submodule_search_locations is None:
                return False
            dotted = ".".join(name.split(".")[:depth])
            spec = importlib.machinery.PathFinder.find_spec(dotted, spec.submodule_search_locations)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file)


def _start_guardian(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    _tell(process, remove=str(folder))
    return process


def _tell(process: subprocess.Popen[bytes], **order: Any) -> None:
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(OSError):
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()


def _stop_guardian(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End of input is its order to kill, quit and remove; see guardian.py."""
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            _tell(process, end=True)
            process.stdin.close()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
