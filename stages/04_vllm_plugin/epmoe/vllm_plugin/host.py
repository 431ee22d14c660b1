"""One vLLM layer's routed experts on a stage: knows tensors and groups, nothing of vLLM.

Legend: T tokens, H hidden, I intermediate, E experts, K experts per token, EP ranks, C capacity in tokens per rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epmoe.core import registry
from epmoe.core.ambient import building
from epmoe.core.errors import UnsupportedError
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer, build
from epmoe.core.placement import Placement, contiguous, explicit, round_robin
from epmoe.core.shape import MoEShape
from epmoe.core.weights import ExpertWeights
from epmoe.core.workspace import Workspace
from epmoe.vllm_plugin.settings import Settings
from epmoe.vllm_plugin.share import Share, most_tokens

Key = tuple[object, ...]


@dataclass(eq=False)
class Shared:
    """What all layers of a model share: the group, and one set of buffers for each combination of sizes."""

    group: EPGroup
    workspaces: dict[Key, Workspace] = field(default_factory=dict)
    warm: set[Key] = field(default_factory=set)
    reserved: set[Key] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What a layer is made from; the same on all ranks but for `share.rank`.

    Attributes:
        name: vLLM's name of the layer.
        shape, placement, capacity: as in `build`.
        share: how tensor-parallel ranks divide their tokens.
        gather: y [t, H] of this rank -> [TP * t, H] of all tensor-parallel ranks; unused where they do not divide.
    """

    name: str
    shape: MoEShape
    placement: Placement
    capacity: int
    share: Share
    gather: Callable[[Tensor], Tensor]


class StagedExperts:
    """Built when the weights are loaded, called in every forward pass; counts its calls."""

    def __init__(self, settings: Settings, spec: HostSpec, shared: Shared):
        self.settings, self.spec, self.shared = settings, spec, shared
        self.layer: MoELayer | None = None
        self.calls = 0
        self.runs: Tensor | None = None  # counted on the device: replays of a graph, too

    def place(self, w13_E2IH: Tensor, w2_EHI: Tensor) -> None:
        """Weights are loaded: build the stage over vLLM's own tensors, not a copy. Collective.

        Later loads come by tensors of the moment, whose values vLLM then copies to where the first ones lie, so that
        graphs stay right. The layer stays, too. What it has on the device beside weights is written anew: a deep sleep
        of vLLM may have given that memory away.
        """
        if self.layer is None:
            with building():
                self._build(ExpertWeights(w13_E2IH.detach(), w2_EHI.detach()))
            return
        tables = self.layer.spec.tables
        tables.mask(tables.gone)
        if self.runs is not None:
            self.runs.zero_()

    def follow(self, w13_E2IH: Tensor, w2_EHI: Tensor) -> None:
        """Before a call: where vLLM's parameters have moved for good, build the stage over them. Then collective."""
        assert self.layer is not None, f"{self.spec.name}: vLLM has not loaded this layer's weights"
        held = self.layer.spec.weights
        pairs = ((held.w13_E2IH, w13_E2IH), (held.w2_EHI, w2_EHI))
        if all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs):
            return
        self.layer.close()
        with building():
            self._build(ExpertWeights(w13_E2IH.detach(), w2_EHI.detach()))

    def _build(self, weights: ExpertWeights) -> None:
        key = self._key(weights)
        options = dict(self.settings.options)
        if "workspace" in registry.load(self.settings.stage).options:
            options["workspace"] = self.shared.workspaces.setdefault(key, Workspace())
        self.layer = build(
            self.settings.stage,
            self.spec.shape,
            weights,
            self.spec.placement,
            self.shared.group,
            self.spec.capacity,
            overflow="rounds",
            **options,
        )
        device = self.shared.group.device
        if self.settings.count and self.runs is None:
            self.runs = torch.zeros((), dtype=torch.int64, device=device)
        if device.type == "cuda" and key not in self.shared.warm:
            self.shared.warm.add(key)
            self.layer.warmup()  # compiles, and ends in a barrier: no rank waits for another's compiler later

    # --8<-- [start:call]
    def __call__(
        self,
        x_TH: Tensor,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        sizes: Sequence[int] | None = None,
        padding_T: Tensor | None = None,
    ) -> Tensor:
        """y_TH [T, H], complete sums, contiguous. Collective.

        Args:
            x_TH, topk_ids_TK, topk_weights_TK: as vLLM has them, the same on tensor-parallel ranks that divide tokens.
            sizes: T of every rank in this step, as vLLM knows it; None where all ranks have the same T.
            padding_T: [T] bool, True for rows that are no tokens: they are routed nowhere and come back as zeros.
        """
        layer, share, tokens = self.layer, self.spec.share, len(x_TH)
        assert layer is not None, f"{self.spec.name}: vLLM has not loaded this layer's weights yet"
        self._reserve(layer)
        self._count()
        if padding_T is not None:
            topk_ids_TK = topk_ids_TK.masked_fill(padding_T[:, None], -1)
        mine = share.slice(tokens)
        y_tH = layer(
            x_TH[mine],
            topk_ids_TK[mine],
            topk_weights_TK[mine],
            max_tokens=most_tokens(tokens, share, sizes),
        )
        if share.ranks == 1:
            return y_tH
        return self.spec.gather(share.pad(y_tH, tokens))[:tokens]

    # --8<-- [end:call]

    def describe(self) -> dict[str, object]:
        """For reports: what runs, and how often it was called."""
        runs = None if self.runs is None else int(self.runs)
        told = self.layer.describe() if self.layer is not None else {"stage": self.settings.stage}
        return {"layer": self.spec.name, **told, "calls": self.calls, "runs": runs}

    def _count(self) -> None:
        self.calls += 1
        if self.runs is not None:
            self.runs.add_(1)

    def _key(self, weights: ExpertWeights) -> Key:
        shape = self.spec.shape
        sizes = (shape.hidden, shape.intermediate, shape.experts, shape.topk, weights.experts)
        return (*sizes, weights.dtype, self.shared.group.device, self.spec.capacity)

    def _reserve(self, layer: MoELayer) -> None:
        """In the first call of a shape, which is vLLM's memory profiling: bring on the worst routing there is.

        A stage whose buffers grow with what arrives needs most when every token of every rank chooses one rank.
        vLLM's own profiling batch is spread, so the first skewed batch would run out of memory.
        """
        key = self._key(layer.spec.weights)
        on_gpu = self.shared.group.device.type == "cuda"
        if key in self.shared.reserved:
            return
        self.shared.reserved.add(key)
        if on_gpu and not layer.capabilities.graph_capturable:
            self.reserve_worst(layer)

    def reserve_worst(self, layer: MoELayer) -> None:
        """One call per rank, in which all tokens of all ranks choose experts of that rank alone. Collective."""
        shape, device, tokens = self.spec.shape, self.shared.group.device, self.spec.capacity
        x_TH = torch.zeros(tokens, shape.hidden, dtype=layer.spec.dtype, device=device)
        weights_TK = torch.ones(tokens, shape.topk, dtype=torch.float32, device=device)
        for rank in range(self.shared.group.size):
            theirs = self.spec.placement.experts_of(rank)
            if theirs:
                row = [theirs[k % len(theirs)] for k in range(shape.topk)]
                ids_TK = torch.tensor(row, dtype=torch.int32, device=device).repeat(tokens, 1)
                layer(x_TH, ids_TK, weights_TK, max_tokens=tokens)


def placement_from_maps(maps: Sequence[Sequence[int]], experts: int) -> Placement:
    """vLLM's expert maps as a placement: maps[r][e] is the slot of expert e on rank r, -1 where it does not live.

    Raises:
        UnsupportedError: an expert without an owner or with two, or slots that do not follow ascending ids.
    """
    owners = []
    for expert in range(experts):
        holders = [rank for rank, slots in enumerate(maps) if slots[expert] >= 0]
        if len(holders) != 1:
            raise UnsupportedError(
                f"expert {expert} lives on {len(holders)} ranks {holders}: exactly one is needed"
            )
        owners.append(holders[0])
    placement = explicit(owners, len(maps))
    for expert, owner in enumerate(owners):
        if maps[owner][expert] != placement.slots[expert]:
            raise UnsupportedError(
                f"expert {expert} is in slot {maps[owner][expert]} of rank {owner}, in ascending order it would be in "
                f"slot {placement.slots[expert]}: this order of experts is not supported"
            )
    for named in (contiguous(experts, len(maps)), round_robin(experts, len(maps))):
        if named.owners == placement.owners:
            return named
    return placement
