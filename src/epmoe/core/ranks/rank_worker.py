"""The program of one rank: join the group, then run what the parent sends, until the parent closes or is gone."""

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist

from epmoe.core import groups
from epmoe.core.ranks import stacks

# What a rank says when it fails only because another one did.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|broken pipe|gloo/transport|timed out waiting"
    r"|wait timeout|remote process exited|ncclRemoteError|ncclSystemError|communicator was aborted",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Outcome:
    """How one run ended on one rank. Exactly one of `value` and `error` is a pickle; None for both: it died."""

    rank: int
    at: float  # seconds of the machine's monotonic clock, comparable between ranks
    operations: int  # communications since the run began
    value: bytes | None = None
    error: bytes | None = None
    text: str = ""  # "Type: message", for an error that does not pickle
    trace: str = ""
    consequence: bool = False  # fails only because another rank did
    fit_for_more: bool = True


def main(config: dict[str, Any]) -> None:
    """Run until told to stop. `config` is what `rank_process.RankProcess` passes."""
    faulthandler.enable()
    stacks.tell_on_request()
    os.set_inheritable(config["fd"], False)
    conn = Connection(config["fd"])
    _end_with_parent(config)
    torch.set_num_threads(config["threads"])
    rank = config["rank"]
    try:
        where = (config["device"], config["rendezvous"])
        group = groups.init(rank, config["size"], *where)
        # All at once, the largest first: torch names a local group after how many groups its members already have,
        # and ranks that joined different numbers of them would wait for each other under different names.
        for n in range(config["size"] - 1, 1, -1):
            group.subgroup(n)
    except Exception as error:
        conn.send(_failure(rank, error, 0, group=None))
        return _leave(1)
    conn.send(Outcome(rank, time.monotonic(), 0, value=pickle.dumps(None)))
    gc.freeze()  # what was imported stays: looking through it for garbage would take longer than many a run
    _serve(rank, group, conn)


def _serve(rank: int, group: groups.EPGroup, conn: Connection) -> NoReturn:
    while True:
        try:
            order = conn.recv()
        except (EOFError, OSError):
            _leave(0)
        if order is None:
            group.close()
            _leave(0)
        conn.send(_run(rank, group, *order))


def _run(rank: int, group: groups.EPGroup, ranks: int, call: bytes) -> Outcome:
    before = group.operations
    part = group
    try:
        part = group.subgroup(ranks) or group
        part.check_exchanges = False
        fn, args, kwargs = pickle.loads(call)
        value = fn(part, *args, **kwargs)
        if part.device.type == "cuda":
            torch.cuda.synchronize(
                part.device
            )  # an error or a hang of queued work belongs to this run
        packed = dump_value(value)
        return Outcome(rank, time.monotonic(), group.operations - before, value=packed)
    except BaseException as error:  # sys.exit is no Exception, and must be told too
        return _failure(rank, error, group.operations - before, part)


def _failure(rank: int, error: BaseException, operations: int, group: Any) -> Outcome:
    at = time.monotonic()
    consequence = is_consequence(error)
    broken_device = "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
    fit = group is not None and not (consequence or broken_device or isinstance(error, MemoryError))
    trace = "".join(traceback.format_exception(error))
    text = f"{type(error).__name__}: {error}"
    return Outcome(rank, at, operations, None, _dump_error(error), text, trace, consequence, fit)


def is_consequence(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from, only says that a peer has gone."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, dist.DistNetworkError | dist.DistStoreError):
            return True
        if isinstance(link, RuntimeError | OSError) and _CONSEQUENCE.search(str(link)):
            return True
        link = link.__cause__
    return False


class _HostPickler(cloudpickle.Pickler):
    """Results come home on the CPU: the parent needs no CUDA context."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
            return obj.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def dump_value(value: Any) -> bytes:
    buffer = io.BytesIO()
    _HostPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _dump_error(error: BaseException) -> bytes:
    """The error as a pickle that is known to load as the same type, or b"" when there is none."""
    try:
        packed = cloudpickle.dumps(error)
        same = type(pickle.loads(packed)) is type(error)
        return packed if same and not isinstance(error, SystemExit | KeyboardInterrupt) else b""
    except Exception:  # whatever a foreign exception's own reduction raises: it travels as text
        return b""


def _end_with_parent(config: dict[str, Any]) -> None:
    """No rank outlives its pool: the socket's hang-up ends it, even while the run holds the main thread."""
    if config["die_with_thread"] and sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != config["parent"]:
        _leave(1)
    threading.Thread(target=_wait_for_hangup, args=(config["fd"],), daemon=True).start()


def _wait_for_hangup(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, 0)  # hang-up and error only; the main thread reads
    poller.poll()
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)  # with whatever the run has started


def _leave(code: int) -> NoReturn:
    """Exit without interpreter shutdown, which can wait for a peer through torch's destructors."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
