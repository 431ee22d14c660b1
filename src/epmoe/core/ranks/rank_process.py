"""One rank seen from the parent: its process, its connection, what it wrote to stderr."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from epmoe.core.ranks import stacks

# The child takes over the parent's sys.path before it imports anything of ours.
_BOOT = (
    "import json, sys; config = json.loads(sys.argv.pop(1)); sys.path[:] = config['path']; "
    "from epmoe.core.ranks.rank_worker import main; main(config)"
)
_TAIL_CHARACTERS = 6000


class RankProcess:
    """A started rank. Its first message is the Outcome of joining the group."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: str,
        rendezvous: Path,
        threads: int,
        environment: dict[str, str],
    ):
        self.rank = rank
        self._stderr_path = rendezvous.with_name(f"{rendezvous.name}-rank{rank}.stderr")
        self._stderr_start = 0
        config: dict[str, Any] = {"rank": rank, "size": size, "device": device}
        config |= {"rendezvous": str(rendezvous), "threads": threads, "parent": os.getpid()}
        # Linux signals the child when the THREAD that made it ends, so only the main thread may ask for that.
        config["die_with_thread"] = threading.current_thread() is threading.main_thread()
        config["path"] = sys.path
        ours, theirs = socket.socketpair()
        with ours, theirs, self._stderr_path.open("wb") as stderr:
            config["fd"] = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the parent's to handle; and killpg reaches grandchildren
            )
            self.conn = Connection(ours.detach())

    def send_run(self, ranks: int, call: bytes) -> None:
        """Start a run; a rank that has died shows in the connection later."""
        self._stderr_start = self._stderr_path.stat().st_size
        with contextlib.suppress(OSError):
            self.conn.send((ranks, call))

    def stderr_tail(self) -> str:
        """The end of what this rank wrote to stderr since the run began."""
        with self._stderr_path.open("rb") as file:
            file.seek(self._stderr_start)
            return file.read().decode(errors="replace")[-_TAIL_CHARACTERS:].strip()

    def dump_stack(self) -> None:
        """Ask the rank, whatever it is doing, to write its Python stacks to stderr."""
        stacks.ask(self.process)

    def how_it_died(self) -> str:
        """The exit code or the signal's name; call it when the connection is at its end."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection and did not exit"
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )

    def ask_to_leave(self) -> None:
        with contextlib.suppress(OSError):
            self.conn.send(None)

    def end(self, patience: float = 0.0) -> None:
        """Wait `patience` seconds for the process to leave, then kill it and whatever it has started; reap it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=max(0.0, patience))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.conn.close()
