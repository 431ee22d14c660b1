"""Several ranks on one GPU: what NCCL needs for it, and the CUDA multi-process service that makes it fast.

NCCL refuses two ranks on a device unless it is recent enough and NCCL_MULTI_RANK_GPU_ENABLE is set. Without the
multi-process service the processes take turns on the GPU, and one collective costs milliseconds, not microseconds.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from epmoe.core.errors import InputError

MIN_NCCL = (2, 30, 0)
LIBRARY_VARIABLE = "EPMOE_NCCL_LIBRARY"
SERVICE = "nvidia-cuda-mps-control"

# New processes on a shared device: a few blocks per collective leave room for the others' kernels, multicast
# needs a device of one's own, and torch's symmetric memory refuses overlapping devices unless told.
ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "8",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}

_ASK_VERSION = """
import ctypes, sys
number = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
print(number.value)
"""


def nccl_library() -> str | None:
    """The libnccl that new ranks will use: the named one, a preloaded one, torch's own.

    Raises:
        InputError: LIBRARY_VARIABLE names no file.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named and not Path(named).is_file():
        raise InputError(f"{LIBRARY_VARIABLE}={named} is no file: give the path of a libnccl.so.2")
    preloaded = os.environ.get("LD_PRELOAD", "").split(":")
    found = (path for path in preloaded if "libnccl" in Path(path).name)
    return named or next(found, None) or loaded_nccl() or _bundled_nccl()


def nccl_version() -> tuple[int, int, int] | None:
    """The version of `nccl_library`, asked from the library itself: torch only knows what it was built with."""
    path = nccl_library()
    if path is None:
        return None
    if path == loaded_nccl():
        number = ctypes.c_int()
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
        return decode_version(number.value)
    # A second NCCL must not be loaded into this process, so another one asks.
    asked = subprocess.run(
        [sys.executable, "-c", _ASK_VERSION, path], capture_output=True, text=True, timeout=60
    )
    return decode_version(int(asked.stdout)) if asked.returncode == 0 else None


def decode_version(number: int) -> tuple[int, int, int]:
    """NCCL's integer as (major, minor, patch): 23007 is 2.30.7, and before 2.9 it was 2804 for 2.8.4."""
    if number < 10000:
        return number // 1000, number % 1000 // 100, number % 100
    return number // 10000, number % 10000 // 100, number % 100


def loaded_nccl() -> str | None:
    """The path of the libnccl mapped into this process (Linux), the first where there are several."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in lines if "libnccl.so" in line)
    return next(paths, None)


def _bundled_nccl() -> str | None:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = spec.submodule_search_locations if spec else None
    found = [p for folder in folders or () for p in Path(folder).glob("lib/libnccl.so*")]
    return str(found[0]) if found else None


def preload(environment: Mapping[str, str]) -> dict[str, str]:
    """LD_PRELOAD for a rank, when LIBRARY_VARIABLE names a library; else nothing."""
    path = environment.get(LIBRARY_VARIABLE)
    if not path:
        return {}
    others = [p for p in environment.get("LD_PRELOAD", "").split(":") if p and p != path]
    return {"LD_PRELOAD": ":".join([path, *others])}


def service_available() -> bool:
    """Whether the multi-process service's control program is installed."""
    return shutil.which(SERVICE) is not None


def service_running(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a control daemon answers in the pipe directory that `environment` (default: ours) names."""
    if not service_available():
        return False
    try:
        asked = subprocess.run(
            [SERVICE],
            input="get_server_list\n",
            env=None if environment is None else dict(environment),
            capture_output=True,
            text=True,
            timeout=10,
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def service_directories(folder: Path) -> dict[str, str]:
    """Variables that give a service its own pipe and log directories inside `folder`."""
    pipes, logs = folder / "service", folder / "service-log"
    pipes.mkdir()
    logs.mkdir()
    return {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}


def start_service(directories: Mapping[str, str], timeout: float = 10.0) -> bool:
    """Start the control daemon in `directories`; False when it does not answer in `timeout` seconds.

    Whoever starts it must send it "quit": it is a daemon, and outlives its parent.
    """
    environment = {**os.environ, **directories}
    # The daemon renumbers the devices that it sees, and its clients would then select among those once more.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    quiet = (
        subprocess.DEVNULL
    )  # a pipe would stay open in the daemon, and this call would wait for it
    try:
        subprocess.run(
            [SERVICE, "-d"],
            env=environment,
            timeout=timeout,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
        )
    except subprocess.TimeoutExpired:
        return False
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if service_running(environment):
            return True
        time.sleep(0.1)
    return False
