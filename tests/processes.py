"""Which process a rank is, and whether one still runs."""

import os
from pathlib import Path

from epmoe.core.groups import EPGroup


def pid_of(group: EPGroup) -> int:
    """A rank program; every rank is up when it returns."""
    group.barrier()
    return os.getpid()


def alive(pid: int) -> bool:
    """Whether the process runs: one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
