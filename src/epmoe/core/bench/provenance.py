"""Where a number comes from: the code, the machine, and its clocks. Everything is read, nothing is set."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# where the tree travels without its history, whoever sends it names the commit (append -dirty for local changes)
SHA_VARIABLE = "EPMOE_GIT_SHA"
_CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}


def machine(device: torch.device) -> dict[str, Any]:
    """Names and versions: git SHA, device, driver, torch, CUDA, Triton, NCCL, vLLM, Python."""
    sha, dirty = git_state()
    found: dict[str, Any] = {
        "git_sha": sha,
        "git_dirty": dirty,
        "device": device_name(device),
        "driver": _ask_gpu(device, ["driver_version"])[0] if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl() if device.type == "cuda" else None,
        "triton": installed("triton"),
        "vllm": installed("vllm"),
    }
    return found


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {platform.machine()}"


def installed(package: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state() -> tuple[str, bool]:
    """The commit and whether files differ from it; ("unknown", True) outside of a clone."""
    named = os.environ.get(SHA_VARIABLE, "")
    if named:
        return named.removesuffix("-dirty"), named.endswith("-dirty")
    folder = Path(__file__).resolve().parent
    sha = _run(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not sha:
        return "unknown", True
    return sha, bool(_run(["git", "-C", str(folder), "status", "--porcelain", "-uno"]))


def clocks(device: torch.device) -> dict[str, str | None]:
    """Clocks, power and temperature now; empty on a CPU."""
    if device.type != "cuda":
        return {}
    return dict(zip(_CLOCKS, _ask_gpu(device, list(_CLOCKS.values())), strict=True))


def _ask_gpu(device: torch.device, fields: list[str]) -> list[str | None]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    text = _run([*command, *_select(device)])
    values = [value.strip() for value in text.splitlines()[0].split(",")] if text else []
    return [*values] if len(values) == len(fields) else [None] * len(fields)


def _select(device: torch.device) -> list[str]:
    """By UUID: nvidia-smi does not follow CUDA_VISIBLE_DEVICES."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return ["-i", f"GPU-{uuid}"] if uuid else ["-i", str(device.index or 0)]


def _nccl() -> str | None:
    from epmoe.core.ranks import gpu_sharing

    # of the library that ranks load, not of the one that torch was built with
    found = gpu_sharing.nccl_version()
    return ".".join(map(str, found)) if found else None


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
