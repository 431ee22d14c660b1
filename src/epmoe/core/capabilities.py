"""What a stage can do, declared; and what a caller needs of one. `epmoe.core.choosing` brings the two together."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from typing import Any

import torch

from epmoe.core.errors import InputError
from epmoe.core.memory import LayerSize, in_words
from epmoe.core.shape import MoEShape
from epmoe.core.values import is_whole
from epmoe.core.weights import ExpertWeights

FLAGS = ("graph_capturable", "deterministic", "batch_invariant", "maskable")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a stage declares; None means no limit of its own.

    Attributes:
        dtypes: of activations and expert weights.
        devices: "cpu", "cuda".
        min_arch: the lowest CUDA compute capability, e.g. (9, 0).
        transports: of the group, see `EPGroup.transport`.
        placements: kinds of expert map.
        graph_capturable: a call can be captured in a CUDA graph.
        deterministic: the same inputs give the same bits, call after call.
        batch_invariant: a token's result does not depend, bit for bit, on who shares its batch.
        maskable: ranks can be masked (`MoELayer.mask_ranks`), and a placement may have lost experts.
        max_tokens, max_topk, max_experts, max_ranks: T per rank, K, E, EP.
        packages: what has to be installed, by the name that is imported; looked for, not imported.
        interpreted_on_cpu: kernels run through an interpreter there: as right, and a thousand times slower. The
            suite leaves its large checks to a GPU then, and `select` takes such a stage on a CPU only if no other can.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    devices: tuple[str, ...] = ("cpu", "cuda")
    min_arch: tuple[int, int] | None = None
    transports: tuple[str, ...] = ("single", "gloo", "nccl")
    placements: tuple[str, ...] = ("contiguous", "round_robin", "explicit")
    graph_capturable: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    maskable: bool = False
    max_tokens: int | None = None
    max_topk: int | None = None
    max_experts: int | None = None
    max_ranks: int | None = None
    packages: tuple[str, ...] = ()
    interpreted_on_cpu: bool = False

    def reasons_against(self, spec: "Spec") -> list[str]:
        """Every reason why `spec` cannot be served, in words; an empty list when it can."""
        reasons = [
            f"{what} {asked} is not among {', '.join(map(str, offered))}"
            for what, asked, offered in (
                ("dtype", spec.dtype, self.dtypes),
                ("device", spec.device, self.devices),
                ("transport", spec.transport, self.transports),
                ("placement", spec.placement, self.placements),
            )
            if asked is not None and asked not in offered
        ]
        reasons += [
            f"{what}={asked} is over the limit of {limit}"
            for what, asked, limit in (
                ("tokens per rank", spec.tokens, self.max_tokens),
                ("topk", spec.topk, self.max_topk),
                ("experts", spec.experts, self.max_experts),
                ("ranks", spec.ranks, self.max_ranks),
            )
            if asked is not None and limit is not None and asked > limit
        ]
        if self.min_arch and spec.arch and spec.arch < self.min_arch:
            reasons.append(f"compute capability {spec.arch} is below {self.min_arch}")
        reasons += [
            f"needs {name}, which is not installed: pip install {name}"
            for name in self.packages
            if find_spec(name) is None
        ]
        for wish in FLAGS:
            if getattr(spec, wish) and not getattr(self, wish):
                reasons.append(f"is not {wish.replace('_', ' ')}")
        return reasons


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a caller wants beyond what the layer's own arguments say; False or None means "no matter".

    Attributes:
        graph_capturable, deterministic, batch_invariant, maskable: as in `Capabilities`.
        memory: bytes that the layer's buffers may take on a rank, see `epmoe.core.memory.Memory`.
    """

    graph_capturable: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    maskable: bool = False
    memory: int | None = None

    def __post_init__(self):
        for name in FLAGS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise InputError(f"{name}={value!r}: give True or False")
        _check_whole("memory", self.memory, 0)


@dataclass(frozen=True, kw_only=True)
class Spec(Wishes):
    """What a stage has to serve; None means "no matter". Fields as in `Capabilities`, and:

    Attributes:
        device_name: the GPU's name, or "cpu": whose measurements count.
        ranks: EP.
        shape: sizes of the layer, for its memory and for what was measured; gives topk and experts too.
        local_experts: the most experts that a rank holds; None for an even share.
        weights: of this rank's experts, for how they lie in memory; not shown.
        options: build options that the stage must take.
    """

    dtype: torch.dtype | None = None
    device: str | None = None
    device_name: str | None = None
    arch: tuple[int, int] | None = None
    transport: str | None = None
    placement: str | None = None
    tokens: int | None = None
    topk: int | None = None
    experts: int | None = None
    ranks: int | None = None
    shape: MoEShape | None = None
    local_experts: int | None = None
    weights: ExpertWeights | None = field(default=None, repr=False, compare=False)
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        _check_whole("tokens", self.tokens, 0)
        for name in ("topk", "experts", "ranks", "local_experts"):
            _check_whole(name, getattr(self, name), 1)
        if self.arch is not None and not _is_arch(self.arch):
            raise InputError(f"arch={self.arch!r}: give a compute capability, such as (9, 0)")
        if self.shape is not None:
            for name in ("topk", "experts"):
                if getattr(self, name) not in (None, getattr(self.shape, name)):
                    raise InputError(
                        f"{name}={getattr(self, name)}, the shape has {getattr(self.shape, name)}: leave one out"
                    )
                object.__setattr__(self, name, getattr(self.shape, name))

    def size(self) -> LayerSize:
        """What memory depends on. Raises InputError where it is not all here."""
        shape, ranks, tokens, dtype = self.shape, self.ranks, self.tokens, self.dtype
        if shape is None or ranks is None or tokens is None or dtype is None:
            raise InputError(
                "a limit of memory needs shape, ranks, tokens and dtype: buffers follow from them"
            )
        return LayerSize(
            shape=shape,
            ranks=ranks,
            capacity=tokens,
            dtype=dtype,
            device=self.device or "cpu",
            local_experts=self.local_experts or -(-shape.experts // ranks),
        )

    def __str__(self) -> str:
        """Only what is asked for."""
        asked = [(f.name, getattr(self, f.name)) for f in fields(self) if f.repr]
        words = [f"{name}={_short(name, v)}" for name, v in asked if v or is_whole(v)]  # 0 is asked
        return ", ".join(words) or "anything"


def _check_whole(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if not is_whole(value) or value < least:
        raise InputError(f"{name}={value!r}: give a whole number of at least {least}, or None")


def _is_arch(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(n) is int for n in value)


def _short(name: str, value: Any) -> str:
    if name == "arch":
        return ".".join(map(str, value))
    if name == "memory":
        return in_words(value)
    return value.name if isinstance(value, MoEShape) else str(value).removeprefix("torch.")
