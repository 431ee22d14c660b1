"""What this machine gives to this process. Standard library only."""

import os
import re
from pathlib import Path


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory_gib() -> float | None:
    """GiB that can be taken without swapping (Linux), None where that cannot be told."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) / 2**20 if found else None
