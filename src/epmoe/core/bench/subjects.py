"""Who is measured: every stage that can run here, torch's grouped product, vLLM's experts. All from logits to output.

A subject is a chain of L layers with different weights over the same draws. It says for itself what it is; one that
cannot run raises UnsupportedError with the reason, which is recorded, never skipped in silence.

Legend: T tokens here, EP ranks, R = EP * T rows, N = R * K assignments, H hidden, K experts per token.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.core import registry
from epmoe.core.bench.peers import DrawLoopback, LoopbackPeers, NoPeers, Peers, RankPeers
from epmoe.core.bench.routers import FUSED, UNFUSED, Route
from epmoe.core.bench.workload import Draw
from epmoe.core.capabilities import Capabilities, Spec
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer, build
from epmoe.core.numerics import swiglu
from epmoe.core.placement import Placement
from epmoe.core.shape import MoEShape
from epmoe.core.split import RoutingExchange, SplitLayer
from epmoe.core.weights import ExpertWeights


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all subjects of one point share.

    Attributes:
        group: the real group; of one rank in loopback.
        rank: the expert-parallel rank that is played here.
        loopback: one rank plays `rank` of `placement.ranks`.
        weights: of this rank's experts, one entry per layer of the chain.
        draws: routings; `tokens` is T of every rank in all of them.
        router, router_name: for subjects that need ids; in their timed region.
    """

    group: EPGroup
    rank: int
    loopback: bool
    shape: MoEShape
    placement: Placement
    dtype: torch.dtype
    weights: Sequence[ExpertWeights]
    draws: Sequence[Draw]
    tokens: int
    router: Route
    router_name: str

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def device(self) -> torch.device:
        return self.group.device

    def peers(self) -> Peers:
        """How gathered rows come about in this setting."""
        if self.loopback:
            return LoopbackPeers(self.ranks, self.draws)
        return RankPeers(self.group) if self.group.size > 1 else NoPeers()


class Subject(ABC):
    """A chain of layers. `call(l, d)` queues layer l on draw d and returns y_TH [T, H]."""

    graph = True
    deterministic = False

    def __init__(self, setting: Setting):
        self.setting = setting

    @abstractmethod
    def call(self, layer: int, draw: int) -> Tensor: ...

    def describe(self) -> dict[str, object]:
        """What this subject is and chose, for the result."""
        return {}

    def close(self) -> None:  # noqa: B027  most subjects hold nothing
        """Give back what it holds. Collective."""

    def chain(self, draw: int) -> list[Tensor]:
        """All layers once, on one draw."""
        return [self.call(layer, draw) for layer in range(len(self.setting.weights))]

    def _own(self, draw: int) -> tuple[Tensor, Tensor, Tensor | None]:
        chosen = self.setting.draws[draw]
        mine = chosen.sources[self.setting.rank]
        return mine.x_TH, mine.logits_TE, chosen.bias_E


class StageSubject(Subject):
    """A registered stage, through the seam: its own fused router where it has one, else the common one before it."""

    def __init__(self, name: str, setting: Setting):
        super().__init__(setting)
        self.stage, options = variant(name)
        group = setting.group
        if setting.loopback:
            group = DrawLoopback(setting.rank, setting.ranks, setting.device)
        self.group = group
        self.layers: list[MoELayer] = [
            build(
                self.stage,
                setting.shape,
                weights,
                setting.placement,
                group,
                setting.tokens,
                check=False,
                **options,
            )
            for weights in setting.weights
        ]
        can = self.layers[0].capabilities
        self.graph, self.deterministic = can.graph_capturable, can.deterministic
        self.router_name = _own_router(self.layers[0])
        if isinstance(group, DrawLoopback):
            self._record(group)

    def _record(self, group: DrawLoopback) -> None:
        for number, one in enumerate(self.setting.draws):
            group.use(number)
            group.record_peers(
                self.layers[0], [(s.x_TH, s.ids_TK, s.weights_TK) for s in one.sources]
            )

    def call(self, layer: int, draw: int) -> Tensor:
        if isinstance(self.group, DrawLoopback):
            self.group.use(draw)
        x_TH, logits_TE, bias_E = self._own(draw)
        one, tokens = self.layers[layer], self.setting.tokens
        if self.router_name is not None:
            return one.from_logits(x_TH, logits_TE, bias_E, max_tokens=tokens)
        return one(x_TH, *self.setting.router(logits_TE, bias_E), max_tokens=tokens)

    def describe(self) -> dict[str, object]:
        router = self.router_name or self.setting.router_name
        return {**self.layers[0].describe(), "router": router}

    def close(self) -> None:
        for layer in self.layers:
            layer.close()


def _own_router(layer: MoELayer) -> str | None:
    """How a layer that is given logits routes them; None for one that is given ids, by the common router.

    A layer whose fused router an ablation has switched off is given logits too: what it then does is what the ablation
    measures.
    """
    if layer.fuses_router:
        return FUSED
    could = isinstance(layer, SplitLayer) and isinstance(layer.exchange, RoutingExchange)
    return UNFUSED if could else None


class GatheredSubject(Subject):
    """Route, gather all ranks' rows, compute the local experts, bring the sums home."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.peers = setting.peers()

    def call(self, layer: int, draw: int) -> Tensor:
        x_TH, logits_TE, bias_E = self._own(draw)
        ids_TK, weights_TK = self.setting.router(logits_TE, bias_E)
        x_RH, ids_RK, weights_RK = self.peers.gather(draw, x_TH, ids_TK, weights_TK)
        return self.peers.home(self.experts(layer, x_RH, ids_RK, weights_RK))

    @abstractmethod
    def experts(self, layer: int, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        """y_RH [R, H] in x's dtype: what the local experts owe every row."""

    def describe(self) -> dict[str, object]:
        return {"router": self.setting.router_name, "exchange": self.peers.describe()}


class GroupedProduct(GatheredSubject):
    """Sort by expert, gather, torch's grouped product, SwiGLU, grouped product, weigh and add: plain torch."""

    deterministic = True

    def __init__(self, setting: Setting):
        super().__init__(setting)
        if not hasattr(F, "grouped_mm"):
            raise UnsupportedError(f"torch {torch.__version__} has no nn.functional.grouped_mm")
        self.local = len(setting.placement.experts_of(setting.rank))
        owners_E = setting.placement.owner_table(setting.device)
        slots_E = setting.placement.slot_table(setting.device)
        self.slot_E = torch.where(owners_E == setting.rank, slots_E, self.local)
        self.borders = torch.arange(self.local, device=setting.device, dtype=torch.int32)

    def experts(self, layer: int, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        weights, topk = self.setting.weights[layer], ids_RK.shape[1]
        slot_N = self.slot_E[ids_RK.flatten()].to(torch.int32)
        sorted_N, order_N = slot_N.sort(stable=True)
        ends = torch.searchsorted(sorted_N, self.borders, right=True).to(torch.int32)
        x_NH = x_RH[order_N // topk]
        h_NI = swiglu(F.grouped_mm(x_NH, weights.w13_E2IH.transpose(1, 2), offs=ends))
        y_NH = F.grouped_mm(h_NI, weights.w2_EHI.transpose(1, 2), offs=ends)
        # rows of other ranks' experts lie behind the last border: nobody computed them
        y_NH = torch.where((sorted_N < self.local)[:, None], y_NH, 0)
        f_NH = torch.empty_like(y_NH).index_copy_(0, order_N, y_NH)
        f_RKH = f_NH.view(-1, topk, f_NH.shape[1]).float() * weights_RK[:, :, None]
        return f_RKH.sum(dim=1).to(x_RH.dtype)

    def describe(self) -> dict[str, object]:
        return {**super().describe(), "experts": "torch.nn.functional.grouped_mm"}


def stage_spec(setting: Setting) -> Spec:
    """What a stage must serve here, for `Capabilities.reasons_against`."""
    on_gpu = setting.device.type == "cuda"
    return Spec(
        dtype=setting.dtype,
        device=setting.device.type,
        arch=torch.cuda.get_device_capability(setting.device) if on_gpu else None,
        transport="loopback" if setting.loopback else setting.group.transport,
        placement=setting.placement.kind,
        tokens=setting.tokens,
        topk=setting.shape.topk,
        experts=setting.shape.experts,
    )


def reasons_against(can: Capabilities, setting: Setting) -> list[str]:
    """Why a stage cannot run in this setting; empty when it can."""
    return can.reasons_against(stage_spec(setting))


def make_subject(name: str, setting: Setting, vllm_configs: dict[int, dict] | None) -> Subject:
    """The subject of that name. Raises UnsupportedError with the reason where it cannot run.

    Args:
        name: a stage, "grouped_mm", or one of `vllm_subjects.NAMES`.
        setting: where.
        vllm_configs: rows -> Triton configuration, for the tuned ones.
    """
    from epmoe.core.bench import vllm_subjects

    knows_replicas = name != "grouped_mm" and name not in vllm_subjects.NAMES
    if setting.placement.kind == "replicated" and not knows_replicas:
        raise UnsupportedError(f"{name} looks for an expert in one place: it knows no replicas")
    if name == "grouped_mm":
        return GroupedProduct(setting)
    if name in vllm_subjects.NAMES:
        return vllm_subjects.make(name, setting, vllm_configs)
    stage, _ = variant(name)
    reasons = reasons_against(registry.load(stage).capabilities, setting)
    if reasons:
        raise UnsupportedError(f"{stage} cannot run here: {'; '.join(reasons)}")
    return StageSubject(name, setting)


def variant(name: str) -> tuple[str, dict[str, Any]]:
    """Stage and build options of a subject's name: "03" is the stage, "03:-pack-merge" it without two fusions."""
    stage, _, off = name.partition(":")
    if off and not off.startswith("-"):
        raise InputError(f"subject {name!r}: write what is left out as {stage}:-one-other")
    return registry.resolve(stage), {"without": ",".join(off[1:].split("-"))} if off else {}


def resolve_names(asked: Sequence[str], ranks_here: int) -> list[str]:
    """Subjects by full name. "auto" means every stage, grouped_mm and what vLLM has for this setting."""
    from epmoe.core.bench import vllm_subjects

    if list(asked) == ["auto"]:
        return [*registry.names(), "grouped_mm", *vllm_subjects.names_for(ranks_here)]
    others = ("grouped_mm", *vllm_subjects.NAMES)
    names = [name if name in others else _full_name(name) for name in asked]
    if len(set(names)) != len(names):
        raise InputError(f"subjects={','.join(asked)}: a subject is named twice")
    return names


def _full_name(name: str) -> str:
    stage, options = variant(name)
    return stage + "".join(f":-{off.replace(',', '-')}" for off in options.values())
