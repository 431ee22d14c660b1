"""Fixed capacity: the exchange of `exchange.py` around the experts of `experts.py`.

What changes: nothing in the layer has a size that depends on the routing.
Why, when it wins, what it costs: see the two parts.
"""

from epmoe.core.capabilities import Capabilities
from epmoe.core.errors import InputError
from epmoe.core.layer import LayerSpec
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
        graph_capturable=True,
        deterministic=True,
    ),
    factory=FixedCapacityLayer,
    options={
        "workspace": "an epmoe.core.workspace.Workspace that several layers share; default: a private one",
        "product": '"grouped_mm", "blocks" or "auto": how rows are multiplied with their experts',
    },
    overflow="rounds",
)
