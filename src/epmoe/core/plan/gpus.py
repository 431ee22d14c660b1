"""What the limits of a layer depend on: a GPU's bandwidths, its arithmetic peak and its sizes.

All rates are per second and per GPU, all sizes in bytes (1 GB = 1e9 bytes, as datasheets count). Datasheets print
tensor peaks with 2:4 sparsity; the figures here are dense, half of those. NVLink is printed as both directions added;
here it is one direction.
"""

import math
from dataclasses import dataclass

from epmoe.core.errors import InputError
from epmoe.core.values import check_whole


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
        sm_count: streaming multiprocessors that are switched on.
        shared_memory_per_block: bytes that one block can ask for.
        memory: bytes of memory.
        capability: CUDA compute capability, (major, minor).
        source: where the datasheet figures come from.
    """

    name: str
    memory_bandwidth: float
    measured_bandwidth: float | None = None
    measured_source: str = ""
    bf16_flops: float
    fp8_flops: float | None = None
    nvlink_bandwidth: float
    sm_count: int
    shared_memory_per_block: int
    memory: float
    capability: tuple[int, int]
    source: str

    def __post_init__(self):
        for field_name in _POSITIVE:
            _check_positive(self.name, field_name, getattr(self, field_name))
        for field_name in ("measured_bandwidth", "fp8_flops"):
            if getattr(self, field_name) is not None:
                _check_positive(self.name, field_name, getattr(self, field_name))
        for field_name in ("sm_count", "shared_memory_per_block"):
            check_whole(f"{self.name}: {field_name}", getattr(self, field_name), 1)
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

_SHARED_MEMORY = (
    227 * 1024
)  # bytes; the same on Hopper and on data-centre Blackwell (CUDA programming guide)

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="h100",
            memory_bandwidth=3.35e12,
            bf16_flops=989.4e12,
            fp8_flops=1978.9e12,
            nvlink_bandwidth=450e9,
            sm_count=132,
            shared_memory_per_block=_SHARED_MEMORY,
            memory=80e9,
            capability=(9, 0),
            source="NVIDIA H100 Tensor Core GPU datasheet, SXM",
        ),
        Gpu(
            name="h200",
            memory_bandwidth=4.8e12,
            measured_bandwidth=4.4e12,
            measured_source="measured: grouped GEMMs that stream expert weights, one H200, Triton 3.6",
            bf16_flops=989.4e12,
            fp8_flops=1978.9e12,
            nvlink_bandwidth=450e9,
            sm_count=132,
            shared_memory_per_block=_SHARED_MEMORY,
            memory=141e9,
            capability=(9, 0),
            source="NVIDIA H200 Tensor Core GPU datasheet, SXM",
        ),
        Gpu(
            name="b200",
            memory_bandwidth=8.0e12,
            bf16_flops=2.25e15,
            fp8_flops=4.5e15,
            nvlink_bandwidth=900e9,
            sm_count=148,
            shared_memory_per_block=_SHARED_MEMORY,
            memory=180e9,
            capability=(10, 0),
            source="NVIDIA DGX B200 datasheet, an eighth of the system",
        ),
    )
}


def named_gpu(name: str) -> Gpu:
    """The GPU of that name, in any case. Raises InputError with the list of names."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise InputError(
            f"no GPU is called {name!r}: choose one of {', '.join(GPUS)}, or make one with custom_gpu"
        )
    return gpu


def custom_gpu(
    memory_bandwidth: float,
    bf16_flops: float,
    nvlink_bandwidth: float,
    *,
    name: str = "custom",
    fp8_flops: float | None = None,
    measured_bandwidth: float | None = None,
    measured_source: str = "",
    sm_count: int = 132,
    shared_memory_per_block: int = _SHARED_MEMORY,
    memory: float = 80e9,
    capability: tuple[int, int] = (9, 0),
    source: str = "given by the caller",
) -> Gpu:
    """A GPU from its figures (units as in `Gpu`); sizes that the limits do not use default to Hopper's."""
    return Gpu(
        name=name,
        memory_bandwidth=memory_bandwidth,
        measured_bandwidth=measured_bandwidth,
        measured_source=measured_source,
        bf16_flops=bf16_flops,
        fp8_flops=fp8_flops,
        nvlink_bandwidth=nvlink_bandwidth,
        sm_count=sm_count,
        shared_memory_per_block=shared_memory_per_block,
        memory=memory,
        capability=capability,
        source=source,
    )
