"""Where a layer's time goes on the GPU: the exchange, waiting for other ranks, and kernel by kernel.

torch's profiler (CUPTI) times every kernel of a few chains, apart from the runs that are reported: a profiled run is
slower. Exchange and waiting are told apart as in `epmoe.core.phase_times`, by the durations of NCCL's kernels.

Kernels that start while their predecessor drains (programmatic dependent launch) count from their start, so the parts
can add up to more than the span.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from epmoe.core.bench.chains import Chain
from epmoe.core.bench.subjects import Setting
from epmoe.core.errors import InputError
from epmoe.core.phase_times import shortest

_RUNS = 4
_ENOUGH = 0.01  # of the span: kernels below are added up as "other kernels"
OTHERS = "other kernels"
# matrix products by the names of their kernels: this project's, vLLM's, CUTLASS's (torch's grouped one), cuBLAS's
_PRODUCTS = ("gate_up_kernel", "down_kernel", "fused_moe_kernel", "device_kernel", "nvjet")


@dataclass(frozen=True)
class Kernel:
    """One launch on the GPU: its name, and start and duration in microseconds."""

    name: str
    start_us: float
    duration_us: float

    @property
    def exchanges(self) -> bool:
        """True for NCCL's kernels."""
        return "nccl" in self.name.lower()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Microseconds per layer, mean over ranks.

    Attributes:
        span_us: from the first kernel's start to the last one's end.
        exchange_us: NCCL kernels, each as short as on the rank that came last.
        wait_us: what NCCL kernels took above that.
        kernels_us: all others by name, those under 1% of the span together.
        launches: kernels per layer, NCCL's included.
    """

    span_us: float
    exchange_us: float
    wait_us: float
    kernels_us: dict[str, float]
    launches: float


def profile_chain(chain: Chain, setting: Setting) -> dict[str, Any]:
    """The profile of one chain as plain data; {} off the GPU, and where a profiler lost kernels. Collective."""
    if setting.device.type != "cuda":
        return {}
    mine = _record(chain, setting)
    by_rank = setting.group.all_gather_objects(mine)
    try:
        return asdict(summarise(by_rank, _RUNS * len(setting.weights)))
    except InputError as error:  # the times are taken already, and do not depend on it
        if setting.group.rank == 0:
            print(f"bench: no profile: {error}", file=sys.stderr, flush=True)
        return {}


def products_us(kernels_us: Mapping[str, float]) -> float:
    """Microseconds of a profile's matrix products."""
    return sum(us for name, us in kernels_us.items() if name.startswith(_PRODUCTS))


def _record(chain: Chain, setting: Setting) -> list[Kernel]:
    """Every kernel of a few runs, in the order of their starts.

    One run more is recorded and left out: in it the ranks, whose profilers start at different times, meet again.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):  # loads CUPTI, which takes seconds once
        chain.run()
        torch.cuda.synchronize(setting.device)
    setting.group.barrier()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(1 + _RUNS):
            chain.run()
        torch.cuda.synchronize(setting.device)
    kernels = [
        Kernel(_short(event.name), event.time_range.start, event.time_range.elapsed_us())
        for event in recorded.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    kernels.sort(key=lambda kernel: kernel.start_us)
    return kernels[len(kernels) // (1 + _RUNS) :]


def summarise(by_rank: Sequence[Sequence[Kernel]], layers: int) -> Profile:
    """One profile of all ranks' kernels.

    Args:
        by_rank: the kernels of every rank, in the order of their starts.
        layers: how many layer calls they are.

    Raises:
        InputError: the ranks hold different numbers of exchanges: a profiler lost some.
    """
    ranks = len(by_rank)
    exchanges = [[k.duration_us for k in kernels if k.exchanges] for kernels in by_rank]
    transfer = sum(shortest(exchanges))
    wait = sum(map(sum, exchanges)) / ranks - transfer
    span = sum(_span(kernels) for kernels in by_rank) / ranks
    parts: dict[str, float] = defaultdict(float)
    for kernel in (k for kernels in by_rank for k in kernels if not k.exchanges):
        parts[kernel.name] += kernel.duration_us / ranks / layers
    return Profile(
        span_us=span / layers,
        exchange_us=transfer / layers,
        wait_us=wait / layers,
        kernels_us=_largest(parts, span / layers),
        launches=sum(map(len, by_rank)) / ranks / layers,
    )


def _span(kernels: Sequence[Kernel]) -> float:
    if not kernels:
        return 0.0
    return max(k.start_us + k.duration_us for k in kernels) - kernels[0].start_us


def _largest(parts: dict[str, float], span: float) -> dict[str, float]:
    large = {name: us for name, us in parts.items() if us >= _ENOUGH * span}
    rest = sum(us for name, us in parts.items() if name not in large)
    ordered = dict(sorted(large.items(), key=lambda item: -item[1]))
    return ordered | ({OTHERS: rest} if rest else {})


def _short(name: str) -> str:
    """A kernel's own name without return type, namespaces, template and call arguments."""
    if name.startswith(
        "_ZN"
    ):  # mangled: the names of a nested one follow each other, each behind its length
        return _unmangled(name[3:])
    plain = re.sub(r"\(anonymous namespace\)", "", name)
    while "<" in plain and plain != (cut := re.sub(r"<[^<>]*>", "", plain)):
        plain = cut
    plain = plain.removeprefix("void ").split("(")[0].split("<")[0].strip()
    return plain.split("::")[-1] or name[:60]


def _unmangled(rest: str) -> str:
    """The last of the leading length-prefixed names: 7cutlass13device_kernelI... is device_kernel."""
    last = ""
    while (length := re.match(r"\d+", rest)) is not None:
        start, size = length.end(), int(length[0])
        last, rest = rest[start : start + size], rest[start + size :]
    return last or rest[:60]
