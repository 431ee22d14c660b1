"""Halves of a split layer, by name: exchanges and experts that `build("fixed_capacity+triton", ...)` puts together.

A part is registered as a stage is, in a group of entry points of its own, under the name that it bears:

    [project.entry-points."epmoe.exchanges"]
    my_exchange = "my_package.exchange:EXCHANGE"

    [project.entry-points."epmoe.experts"]
    my_experts = "my_package.experts:EXPERTS"
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from epmoe.core.capabilities import Capabilities
from epmoe.core.contract import Accepts, Delivers

if TYPE_CHECKING:
    from epmoe.core.layer_spec import LayerSpec
    from epmoe.core.memory import LayerSize, Memory
    from epmoe.core.split import Exchange, Experts
    from epmoe.core.tune import Tuner
    from epmoe.core.weights import ExpertWeights
    from epmoe.core.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class ExchangePart:
    """What an entry point of `epmoe.exchanges` names.

    Attributes:
        name: the registered name.
        summary: one line: how rows travel.
        capabilities: of the exchange alone; its transports and placements are those of every pair.
        delivers: what it promises of the rows.
        factory: makes it from a checked spec and the layer's workspace, outside of any graph capture.
        options: names of the keyword options of `build` that it reads from `spec.options`, with their meaning.
        switches: those of them that are True or False.
        overflow: what calls with more than max_tokens_per_rank tokens do by default, "raise" or "rounds".
        memory: bytes of its buffers for layers of a size, with the default options; None where nobody worked them out.
        grants: capability -> the options that switch it on.
    """

    name: str
    summary: str
    capabilities: Capabilities
    delivers: Delivers
    factory: "Callable[[LayerSpec, Workspace], Exchange[Any]]"
    options: Mapping[str, str] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    overflow: str = "raise"
    memory: "Callable[[LayerSize], Memory] | None" = None
    grants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExpertsPart:
    """What an entry point of `epmoe.experts` names.

    Attributes:
        name: the registered name.
        summary: one line: how the local experts are computed.
        capabilities: of the experts alone; they see neither transport nor placement, which do not count.
        accepts: which deliveries they can work with.
        factory: makes them from a checked spec, the layer's workspace and what will be delivered.
        options, switches, grants: as in `ExchangePart`.
        memory: as in `ExchangePart`, given also what will be delivered.
        tuner: measures configurations for `epmoe tune`, or None where there is nothing to tune.
        reasons_against: why weights cannot be read where they lie in memory, in words; None where all layouts can.
    """

    name: str
    summary: str
    capabilities: Capabilities
    accepts: Accepts = field(default_factory=Accepts)
    factory: "Callable[[LayerSpec, Workspace, Delivers], Experts]"
    options: Mapping[str, str] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    memory: "Callable[[LayerSize, Delivers], Memory] | None" = None
    grants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    tuner: "Tuner | None" = None
    reasons_against: "Callable[[ExpertWeights], list[str]] | None" = None
