"""What the limits of a layer depend on: a GPU's bandwidths, its arithmetic peak and its sizes.

All rates are per second and per GPU, all sizes in bytes (1 GB = 1e9 bytes, as datasheets count). Datasheets print
tensor peaks with 2:4 sparsity; the figures here are dense, half of those. NVLink is printed as both directions added;
here it is one direction.
"""

import math
from dataclasses import dataclass

from epmoe.core.errors import InputError


def _check_positive(gpu: str, field_name: str, value: float) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{gpu}: {field_name}={value!r} must be a positive number")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: the short name.
        memory_bandwidth: bytes/s between memory and chip, datasheet.
        measured_bandwidth: bytes/s that a kernel which streams weights was seen to reach; None where nobody measured.
        measured_source: what was measured, and how; empty without a measurement.
        bf16_flops: dense operations/s of the tensor cores in bfloat16 or float16 (a multiply-add counts as two).
        fp8_flops: the same in 8-bit floats; None where the GPU has none.
        nvlink_bandwidth: bytes/s that one GPU can send while it receives as much.
        memory: bytes of memory.
        source: where the datasheet figures come from.
    """

    name: str
    memory_bandwidth: float
    measured_bandwidth: float | None = None
    measured_source: str = ""
    bf16_flops: float
    fp8_flops: float | None = None
    nvlink_bandwidth: float
    memory: float
    source: str

    def __post_init__(self):
        for field_name in _POSITIVE:
            _check_positive(self.name, field_name, getattr(self, field_name))
        for field_name in ("measured_bandwidth", "fp8_flops"):
            if getattr(self, field_name) is not None:
                _check_positive(self.name, field_name, getattr(self, field_name))
        if self.measured_bandwidth is not None and not self.measured_source:
            raise InputError(
                f"{self.name}: measured_bandwidth={self.measured_bandwidth:g} has no measured_source: say what was run"
            )

    @property
    def streaming_bandwidth(self) -> float:
        """Bytes/s that the memory floor divides by: the measured figure where there is one, else the datasheet's."""
        return self.measured_bandwidth or self.memory_bandwidth

    @property
    def streaming_source(self) -> str:
        """Where `streaming_bandwidth` comes from, in words."""
        return self.measured_source if self.measured_bandwidth else f"datasheet: {self.source}"

    def flops(self, dtype: str) -> float:
        """Dense operations/s in `dtype` (bfloat16, float16, float8). Raises InputError for another one."""
        peaks = {"bfloat16": self.bf16_flops, "float16": self.bf16_flops, "float8": self.fp8_flops}
        peak = peaks.get(dtype)
        if peak is None:
            known = ", ".join(name for name, value in peaks.items() if value)
            raise InputError(f"{self.name} has no peak for dtype {dtype!r}: choose one of {known}")
        return peak


_POSITIVE = (
    "memory_bandwidth",
    "bf16_flops",
    "nvlink_bandwidth",
    "memory",
)

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="h100",
            memory_bandwidth=3.35e12,
            bf16_flops=989.4e12,
            fp8_flops=1978.9e12,
            nvlink_bandwidth=450e9,
            memory=80e9,
            source="NVIDIA H100 Tensor Core GPU datasheet, SXM",
        ),
        Gpu(
            name="h200",
            memory_bandwidth=4.8e12,
            measured_bandwidth=4.4e12,
            measured_source="measured: expert products of h200x2-ep2.json at T = 128, torch 2.11, Triton 3.6",
            bf16_flops=989.4e12,
            fp8_flops=1978.9e12,
            nvlink_bandwidth=450e9,
            memory=141e9,
            source="NVIDIA H200 Tensor Core GPU datasheet, SXM",
        ),
        Gpu(
            name="b200",
            memory_bandwidth=8.0e12,
            bf16_flops=2.25e15,
            fp8_flops=4.5e15,
            nvlink_bandwidth=900e9,
            memory=180e9,
            source="NVIDIA DGX B200 datasheet, an eighth of the system",
        ),
    )
}


CUSTOM = "custom"
EXAMPLE = f"{CUSTOM}:TB/s,TFLOP/s,GB/s, such as {CUSTOM}:4.8,990,450"


def named_gpu(name: str) -> Gpu:
    """The GPU of that name, in any case, or the one whose figures it gives.

    custom:TB/s,TFLOP/s,GB/s are the memory's bandwidth, dense bfloat16 and one direction of the link. Raises InputError
    with the list of names for anything else.
    """
    kind, colon, figures = name.partition(":")
    if kind.lower() == CUSTOM and colon:
        return _with_figures(name, figures)
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise InputError(
            f"no GPU is called {name!r}: choose one of {', '.join(GPUS)}, or give its figures: {EXAMPLE}"
        )
    return gpu


def _with_figures(name: str, figures: str) -> Gpu:
    try:
        memory, flops, link = (float(one) for one in figures.split(","))
    except ValueError:
        raise InputError(f"gpu={name!r}: write {EXAMPLE}") from None
    return custom_gpu(memory * 1e12, flops * 1e12, link * 1e9)


def custom_gpu(
    memory_bandwidth: float,
    bf16_flops: float,
    nvlink_bandwidth: float,
) -> Gpu:
    """A GPU from the figures that every limit needs (units as in `Gpu`); `dataclasses.replace` adds others."""
    return Gpu(
        name=CUSTOM,
        memory_bandwidth=memory_bandwidth,
        bf16_flops=bf16_flops,
        nvlink_bandwidth=nvlink_bandwidth,
        memory=80e9,  # no limit depends on it
        source="given by the caller",
    )
