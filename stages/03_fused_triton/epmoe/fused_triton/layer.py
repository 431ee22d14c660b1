"""The same two all-to-alls; everything around them is a handful of kernels.

What changes: pack, metadata, both products with their gather and SwiGLU, and both sums are one Triton kernel each.
Why: at decode the layer should do nothing but stream the weights of the active experts; every launch beside that costs.
When it wins: always on a GPU; most at one token, where launches are most of the time.
What it costs: kernels to maintain and to tune, and intermediate buffers of EP * C * K rows.

    logits -route, pack-> send ==> recv -group-> tiles -gate_up-> h -down-> f -reduce-> y ==> home -merge-> out
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epmoe.core.capabilities import Capabilities
from epmoe.core.errors import InputError
from epmoe.core.layer import LayerSpec
from epmoe.core.placement import KINDS
from epmoe.core.registry import Stage
from epmoe.core.split import SplitLayer
from epmoe.core.workspace import Workspace
from epmoe.fused_triton import fusions, interpreter
from epmoe.fused_triton.tuner import TUNER

if TYPE_CHECKING:
    from epmoe.fused_triton.exchange import FusedExchange
    from epmoe.fused_triton.experts import TritonExperts


class FusedTritonLayer(SplitLayer[Tensor]):
    """The split layer of `FusedExchange` and `TritonExperts`."""

    exchange: "FusedExchange"
    experts: "TritonExperts"

    def __init__(self, spec: LayerSpec):
        interpreter.prepare(spec.device.type)
        from epmoe.fused_triton.exchange import FusedExchange
        from epmoe.fused_triton.experts import TritonExperts
        from epmoe.fused_triton.kernels._launch import pdl_supported
        from epmoe.fused_triton.tuning import Tuning

        shared = spec.options.get("workspace")
        if shared is not None and not isinstance(shared, Workspace):
            raise InputError(f"workspace={shared!r}: give an epmoe.core.workspace.Workspace")
        self.workspace, self._owns_workspace = shared or Workspace(), shared is None
        self.fusions = fusions.parse(spec.options.get("without", ""))
        self.pinned = bool(spec.options.get("batch_invariant", False))
        pdl = "overlap" in self.fusions and pdl_supported(spec.device)
        tuning = Tuning.of(spec, self.pinned)
        experts = TritonExperts(
            spec.weights, self.workspace, tuning, spec.group.size, self.fusions, pdl, self.pinned
        )
        experts.reserve(spec.group.size * spec.max_tokens_per_rank * spec.shape.topk)
        super().__init__(spec, FusedExchange(spec, self.workspace, self.fusions, pdl), experts)

    def from_logits(
        self,
        x_TH: Tensor,
        logits_TE: Tensor,
        bias_E: Tensor | None = None,
        *,
        max_tokens: int | None = None,
    ) -> Tensor:
        """As in `MoELayer`, with the router inside the pack kernel where one round will do."""
        fused = {"router", "pack"} <= self.fusions and not self.spec.check
        fused = fused and self.spec.lost == "drop"  # else weights change between router and pack
        if not fused or not self._one_round(len(x_TH), max_tokens):
            return super().from_logits(x_TH, logits_TE, bias_E, max_tokens=max_tokens)
        ids_TK = torch.empty(len(x_TH), self.spec.shape.topk, dtype=torch.int32, device=x_TH.device)
        routing = (ids_TK, torch.empty(ids_TK.shape, device=x_TH.device))  # written by the kernel
        self._check(x_TH, *routing, max_tokens)
        capacity = max_tokens or self.spec.max_tokens_per_rank
        with torch.no_grad():
            rows, state = self.exchange.dispatch(x_TH, *routing, capacity, (logits_TE, bias_E))
            return self.exchange.combine(self.experts(rows), state)

    def _one_round(self, tokens: int, max_tokens: int | None) -> bool:
        """Whether every rank knows, without asking, that one round of this capacity is enough."""
        declared = max_tokens if max_tokens is not None else self.spec.max_tokens_per_rank
        asks = max_tokens is None and self.spec.group.size > 1
        return not asks and 1 <= declared <= self.spec.max_tokens_per_rank and tokens <= declared

    def describe(self) -> dict[str, object]:
        """Adds the tile sizes in use and where they come from, the fusions, and the bytes of all buffers."""
        choice = self.experts.tuning.choice(self.spec.max_tokens_per_rank)
        return {
            **super().describe(),
            "tuning": choice.source,
            "gate_up": choice.config.gate_up.to_dict(),
            "down": choice.config.down.to_dict(),
            "fusions": sorted(self.fusions),
            "workspace_bytes": self.workspace.nbytes,
        }

    def close(self) -> None:
        if not self.closed and self._owns_workspace:
            self.workspace.clear()
        super().close()


STAGE = Stage(
    summary="the same two exchanges; everything around them in fused Triton kernels",
    capabilities=Capabilities(
        transports=("single", "gloo", "nccl", "loopback"),
        placements=KINDS,
        min_arch=(8, 0),
        graph_capturable=True,
        deterministic=True,
        maskable=True,
        max_topk=32,
        max_experts=1024,
        interpreted_on_cpu=True,
    ),
    factory=FusedTritonLayer,
    options={
        "workspace": "an epmoe.core.workspace.Workspace that several layers share; default: a private one",
        "without": "fusions to switch off, such as 'pack,merge': " + ", ".join(fusions.FUSIONS),
        "batch_invariant": "one tile size for all calls: a token's bits do not depend on its batch",
        "ring": "round to the layer's dtype after every rank in the merge, as a ring of partial sums does (less exact)",
    },
    overflow="rounds",
    tuner=TUNER,
    grants={"batch_invariant": {"batch_invariant": True}},
)
