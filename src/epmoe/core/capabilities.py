"""What a stage can do, declared; and `select`, which chooses with a reason for everything it did not choose."""

from dataclasses import dataclass, field

import torch

from epmoe.core.errors import UnsupportedError


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
        max_tokens, max_topk, max_experts: T per rank, K, E.
        interpreted_on_cpu: kernels run through an interpreter there: as right, and a thousand times slower. The
            suite leaves its large checks to a GPU then.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    devices: tuple[str, ...] = ("cpu", "cuda")
    min_arch: tuple[int, int] | None = None
    transports: tuple[str, ...] = ("single", "gloo", "nccl")
    placements: tuple[str, ...] = ("contiguous", "round_robin", "explicit")
    graph_capturable: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    max_tokens: int | None = None
    max_topk: int | None = None
    max_experts: int | None = None
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
            )
            if asked is not None and limit is not None and asked > limit
        ]
        if self.min_arch and spec.arch and spec.arch < self.min_arch:
            reasons.append(f"compute capability {spec.arch} is below {self.min_arch}")
        for wish in ("graph_capturable", "deterministic", "batch_invariant"):
            if getattr(spec, wish) and not getattr(self, wish):
                reasons.append(f"is not {wish.replace('_', ' ')}")
        return reasons


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a caller needs; None or False means "no matter". Fields as in `Capabilities`."""

    dtype: torch.dtype | None = None
    device: str | None = None
    arch: tuple[int, int] | None = None
    transport: str | None = None
    placement: str | None = None
    tokens: int | None = None
    topk: int | None = None
    experts: int | None = None
    graph_capturable: bool = False
    deterministic: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True)
class Selection:
    """The chosen stage, and for each other stage why it was not."""

    chosen: str
    reasons: dict[str, list[str]] = field(default_factory=dict)


def select(spec: Spec, stages: "dict[str, Capabilities] | None" = None) -> Selection:
    """The last (fastest) rung of the ladder that can serve `spec`; never a silent fallback.

    Args:
        spec: what is needed.
        stages: candidates in ladder order; every registered stage by default.

    Raises:
        UnsupportedError: no stage can; the message lists each stage with its reasons.
    """
    from epmoe.core import registry

    candidates = registry.all_capabilities() if stages is None else stages
    reasons = {name: can.reasons_against(spec) for name, can in candidates.items()}
    able = [name for name in candidates if not reasons[name]]
    if not able:
        listed = "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())
        raise UnsupportedError(f"no stage can serve {spec}: {listed or 'no stage is registered'}")
    chosen = able[-1]
    for name in able[:-1]:
        reasons[name] = [f"could serve this, but {chosen} is the later rung"]
    reasons.pop(chosen)
    return Selection(chosen, reasons)
