"""Fixed capacity: the exchange of `exchange.py` around the experts of `experts.py`.

What changes: nothing in the layer has a size that depends on the routing.
Why, when it wins, what it costs: see the two parts.

Memory formula, in bytes, whatever the routing and however long the prompt (s bytes of a value, B of a packed row,
N = EP * C * K assignments of one round, R = EP * C rows, M rows of a block, P = N + M * E_local padded rows):

    kept, or shared through `workspace`   EP * C * (2 B + 4 H)
    of one round, by "blocks"             H * (4 N + max(2 s P, 4 N + 8 R)), about 96 (N + 4 M) of indices,
                                          and s * 3 H I for the weights of one expert
    of the result                         T * H * s; a round more does not add to the others

Batch invariance. With "blocks" a term depends, bit for bit, on its token, its expert and its place among the M rows of
a block; K places and ranks are then added in a fixed order. So a token's result is the same alone, in any batch and in
rounds where the matrix library treats the M rows of a product alike. Those of torch on an AVX-512 CPU do, for float32,
bfloat16 and float16 (tests/test_batch.py looks first); a product of 1 row has other bits there than one of 16, hence
blocks of a fixed size. "grouped_mm" may choose its tiles from all sizes together, and nothing promises that a row keeps
its bits. A stage declares for all devices, so `batch_invariant` stays False.
"""

from epmoe.core.capabilities import Capabilities
from epmoe.core.errors import InputError
from epmoe.core.layer import LayerSpec
from epmoe.core.placement import KINDS
from epmoe.core.registry import Stage
from epmoe.core.split import SplitLayer
from epmoe.core.workspace import Workspace
from epmoe.fixed_capacity.exchange import FixedCapacity
from epmoe.fixed_capacity.experts import StaticExperts


class FixedCapacityLayer(SplitLayer):
    """The split layer with its buffers in a workspace."""

    def __init__(self, spec: LayerSpec):
        shared = spec.options.get("workspace")
        if shared is not None and not isinstance(shared, Workspace):
            raise InputError(f"workspace={shared!r}: give an epmoe.core.workspace.Workspace")
        self.workspace = shared or Workspace()
        self._owns_workspace = shared is None
        product = str(spec.options.get("product", "auto"))
        experts = StaticExperts(spec.weights, product)
        super().__init__(spec, FixedCapacity(spec, self.workspace), experts)

    def describe(self) -> dict[str, object]:
        """Adds the matrix product in use and the bytes of the exchange buffers."""
        assert isinstance(self.experts, StaticExperts)
        return {
            **super().describe(),
            "product": self.experts.product,
            "workspace_bytes": self.workspace.nbytes,
        }

    def close(self) -> None:
        if not self.closed and self._owns_workspace:
            self.workspace.clear()
        super().close()


STAGE = Stage(
    summary="static shapes: one packed all-to-all out, one back, no host sync",
    capabilities=Capabilities(
        transports=("single", "gloo", "nccl", "loopback"),
        placements=KINDS,
        graph_capturable=True,
        deterministic=True,
        maskable=True,
    ),
    factory=FixedCapacityLayer,
    options={
        "workspace": "an epmoe.core.workspace.Workspace that several layers share; default: a private one",
        "product": '"grouped_mm", "blocks" or "auto": how rows are multiplied with their experts',
    },
    overflow="rounds",
)
