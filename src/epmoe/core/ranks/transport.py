"""Which devices and which transport the ranks of one host use. The rule is a pure function.

Never a silent fallback.

| asked                   | here                                        | chosen                          |
|-------------------------|---------------------------------------------|---------------------------------|
| one rank                | anything                                    | "single", no communication      |
| auto                    | as many GPUs as ranks                       | NCCL, one GPU a rank            |
| auto                    | fewer GPUs, an NCCL that can share a GPU    | NCCL, ranks share GPUs          |
| auto                    | else                                        | gloo on the CPU, saying why     |
| device="cuda" or NCCL   | impossible                                  | UnsupportedError with the fix   |
"""

from dataclasses import dataclass, replace

import torch

from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.machine import cores
from epmoe.core.ranks import gpu_sharing

MOST_RANKS = (
    64  # of one machine, or a rank for every core: each is a process with a torch of its own
)


@dataclass(frozen=True)
class Choice:
    """What `ranks` ranks of this host use.

    `devices` counts the GPUs in use; `reason` is one sentence; `fallback`: GPUs are here, nobody asked for the CPU,
    and yet it is the CPU.
    """

    ranks: int
    transport: str
    device_type: str
    devices: int
    shared: bool
    reason: str
    fallback: bool = False

    def device_of(self, local_rank: int) -> str:
        """The torch device of one rank; ranks go round the GPUs."""
        return "cpu" if self.device_type == "cpu" else f"cuda:{local_rank % self.devices}"


def choose_transport(
    ranks: int,
    device: str = "auto",
    transport: str | None = None,
    *,
    cuda_devices: int,
    nccl_version: tuple[int, int, int] | None,
    world: int | None = None,
) -> Choice:
    """Apply the table above.

    Args:
        ranks: ranks on this host.
        device: "auto", "cpu" or "cuda".
        transport: None, "gloo" or "nccl".
        cuda_devices: CUDA devices that this process sees.
        nccl_version: (major, minor, patch) of the NCCL that the ranks will load, None when there is none.
        world: ranks on all hosts, when there are more.

    Raises:
        InputError: an unknown name, or fewer than one rank.
        UnsupportedError: CUDA or NCCL was asked for and cannot be had; says why and what to do.
    """
    _check_names(ranks, device, transport)
    wants_cuda = device == "cuda" or transport == "nccl"
    if device == "cpu" or transport == "gloo":
        return _on_cpu(ranks, world, f"{'gloo' if transport else 'cpu'} was asked for")
    if cuda_devices == 0:
        why = "no CUDA device"
        fix = "check nvidia-smi and that torch is a CUDA build, or use device='cpu'"
    elif (world or ranks) == 1:
        return Choice(1, "single", "cuda", 1, False, "1 rank on cuda:0, nothing to communicate")
    elif nccl_version is None:
        why, fix = (
            "torch has no NCCL here",
            "install torch's CUDA build for Linux, or use device='cpu'",
        )
    elif ranks <= cuda_devices:
        text = (
            f"{_count(ranks)} on {_gpus(ranks)} over NCCL {_dotted(nccl_version)}, one GPU a rank"
        )
        return Choice(ranks, "nccl", "cuda", ranks, False, text)
    elif nccl_version >= gpu_sharing.MIN_NCCL:
        text = f"{_count(ranks)} share {_gpus(cuda_devices)} over NCCL {_dotted(nccl_version)}"
        return Choice(ranks, "nccl", "cuda", cuda_devices, True, text)
    else:
        need = _dotted(gpu_sharing.MIN_NCCL)
        why = f"NCCL here is {_dotted(nccl_version)} and needs >= {need} to share a GPU"
        fix = (
            f"start at most {cuda_devices} rank(s), or point {gpu_sharing.LIBRARY_VARIABLE} at the "
            f"libnccl.so.2 of NCCL >= {need}, or use device='cpu'"
        )
    if wants_cuda:
        raise UnsupportedError(
            f"{_count(ranks)} on {cuda_devices} CUDA device(s): {why}. To fix it: {fix}"
        )
    if cuda_devices == 0:
        return _on_cpu(ranks, world, why)
    return replace(_on_cpu(ranks, world, f"{why}, so gloo on cpu instead"), fallback=True)


def choose_here(
    ranks: int, device: str = "auto", transport: str | None = None, world: int | None = None
) -> Choice:
    """`choose_transport` with what this machine has. Creates no CUDA context in this process.

    Raises as it does, and InputError for more ranks than a machine takes.
    """
    check_ranks(ranks, device)
    devices = torch.cuda.device_count() if device != "cpu" and transport != "gloo" else 0
    version = gpu_sharing.nccl_version() if devices else None
    return choose_transport(
        ranks, device, transport, cuda_devices=devices, nccl_version=version, world=world
    )


def one_device(asked: str = "auto") -> str:
    """The kind of device of a process that is the only rank: cpu or cuda. Raises as `choose_transport`."""
    return choose_here(1, asked).device_type


def check_ranks(ranks: int, device: str) -> None:
    """Raise InputError for a number of ranks that this machine cannot start, or for an unknown device."""
    _check_names(ranks, device, None)
    most = max(MOST_RANKS, cores())
    if ranks > most:
        raise InputError(
            f"{ranks} ranks: one machine takes at most {most} (a process each), start fewer"
        )


def _check_names(ranks: int, device: str, transport: str | None) -> None:
    if ranks < 1:
        raise InputError(f"{ranks} ranks: give at least 1")
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device {device!r}: give 'auto', 'cpu' or 'cuda'")
    if transport not in (None, "gloo", "nccl"):
        raise InputError(f"transport {transport!r}: give None, 'gloo' or 'nccl'")
    if (device, transport) in (("cuda", "gloo"), ("cpu", "nccl")):
        raise UnsupportedError(
            f"device={device!r} with transport={transport!r}: gloo works on cpu, NCCL on cuda"
        )


def _on_cpu(ranks: int, world: int | None, why: str) -> Choice:
    if (world or ranks) == 1:
        return Choice(
            1, "single", "cpu", 0, False, f"1 rank on cpu, nothing to communicate ({why})"
        )
    return Choice(ranks, "gloo", "cpu", 0, False, f"{_count(ranks)} on cpu over gloo ({why})")


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _gpus(n: int) -> str:
    return "cuda:0" if n == 1 else f"cuda:0 to cuda:{n - 1}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
