"""Stages by name, found through the entry-point group `epmoe.stages` and imported only when used.

A stage of this repository is registered under its folder's name (`01_variable_a2a`) and answers to `variable_a2a` and
`01` as well. A package outside registers the same way, under a name of its own:

    [project.entry-points."epmoe.stages"]
    my_stage = "my_package.layer:STAGE"

A pair `exchange+experts` of registered parts (see `epmoe.core.parts`) is a stage under that name, everywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from epmoe.core.capabilities import Capabilities
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.parts import ExchangePart, ExpertsPart

if TYPE_CHECKING:
    from epmoe.core.layer import MoELayer
    from epmoe.core.layer_spec import LayerSpec
    from epmoe.core.memory import LayerSize, Memory
    from epmoe.core.tune import Tuner
    from epmoe.core.weights import ExpertWeights

STAGES, EXCHANGES, EXPERTS = "epmoe.stages", "epmoe.exchanges", "epmoe.experts"
JOINT = "+"  # between the names of a pair


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What an entry point names.

    Attributes:
        summary: one line: the idea that this stage adds.
        capabilities: what it declares; `build` refuses everything else with the reasons.
        factory: makes the layer from a checked spec.
        options: names of the keyword options that `build` passes on, with their meaning.
        switches: those of them that are True or False.
        tuner: measures configurations for `epmoe tune`, or None where there is nothing to tune.
        overflow: what calls with more than max_tokens_per_rank tokens do by default, "raise" or "rounds".
        memory: bytes of buffers for layers of a size, with the default options; None where nobody worked them out.
        grants: capability -> the options that switch it on.
        reasons_against: why weights cannot be read where they lie in memory, in words; None where all layouts can.
        parts: what it is composed of, None for a layer that is written whole.
    """

    summary: str
    capabilities: Capabilities
    factory: "Callable[[LayerSpec], MoELayer]"
    options: dict[str, str]
    switches: tuple[str, ...] = ()
    overflow: str = "raise"
    tuner: "Tuner | None" = None
    memory: "Callable[[LayerSize], Memory] | None" = None
    grants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    reasons_against: "Callable[[ExpertWeights], list[str]] | None" = None
    parts: tuple[ExchangePart, ExpertsPart] | None = None

    def problems_with(self, options: Mapping[str, object]) -> list[str]:
        """Why these options cannot be taken, in words; empty when they can."""
        unknown = sorted(set(options) - set(self.options))
        unset = [s for s in self.switches if not isinstance(options.get(s, False), bool)]
        return [
            *(f"has no option {name}" for name in unknown),
            *(f"{name}={options[name]!r}: give True or False" for name in unset),
        ]

    def capabilities_with(self, options: Mapping[str, object]) -> Capabilities:
        """Of a layer that is built with these options."""
        granted = {
            name: True
            for name, needed in self.grants.items()
            if all(options.get(option) == value for option, value in needed.items())
        }
        return replace(self.capabilities, **granted)


_KINDS = {
    STAGES: ("stage", Stage),
    EXCHANGES: ("exchange", ExchangePart),
    EXPERTS: ("experts", ExpertsPart),
}


def names() -> list[str]:
    """Registered stages in ladder order: numbered ones first, then others by name. Pairs are in `pairs`."""
    return sorted(_entries(STAGES), key=lambda name: (not name[:1].isdigit(), name))


def exchanges() -> list[str]:
    """Names of the registered exchanges."""
    return sorted(_entries(EXCHANGES))


def experts() -> list[str]:
    """Names of the registered experts."""
    return sorted(_entries(EXPERTS))


def pairs() -> list[str]:
    """Every pair of registered parts that fit, by name, but for those that are stages already. Imports them all."""
    from epmoe.core.compose import reasons_against_pair

    stages = [stage for stage in loaded(STAGES).values() if isinstance(stage, Stage)]
    taken = [tuple(part.name for part in stage.parts) for stage in stages if stage.parts]
    return [
        f"{exchange.name}{JOINT}{some.name}"
        for exchange in loaded(EXCHANGES).values()
        for some in loaded(EXPERTS).values()
        if isinstance(exchange, ExchangePart)
        and isinstance(some, ExpertsPart)
        and (exchange.name, some.name) not in taken
        and not reasons_against_pair(exchange, some)
    ]


def resolve(name: str) -> str:
    """The registered name for `name`, which may also be a bare name, a number or a pair. Raises InputError."""
    if not isinstance(name, str):
        raise InputError(f"stage={name!r}: give a name, such as {names()[0]!r}")
    if JOINT in name:
        exchange, _, some = name.partition(JOINT)
        _known(EXCHANGES, exchange)
        _known(EXPERTS, some)
        return name
    registered = names()
    matches = [r for r in registered if name in (r, *_aliases(r))]
    if len(matches) != 1:
        what = f"several stages ({', '.join(matches)})" if matches else "no stage"
        raise InputError(
            f"{what} called {name!r}: choose one of {', '.join(registered)}, or a pair {_pairs_in_words()}"
        )
    return matches[0]


def load(name: str) -> Stage:
    """Import a stage, or the two parts of a pair.

    Raises:
        InputError: an unknown name.
        UnsupportedError: its package cannot be imported, or the parts do not fit; says why.
    """
    registered = resolve(name)
    if JOINT not in registered:
        return _load(STAGES, registered)
    from epmoe.core.compose import compose

    exchange, _, some = registered.partition(JOINT)
    return compose(_load(EXCHANGES, exchange), _load(EXPERTS, some))


def loaded(group: str) -> dict[str, Any]:
    """Everything in one group of entry points by name: what it names, or the UnsupportedError that says why not."""
    ordered = names() if group == STAGES else sorted(_entries(group))
    found: dict[str, Any] = {}
    for name in ordered:
        try:
            found[name] = _load(group, name)
        except UnsupportedError as error:
            found[name] = error
    return found


def _load(group: str, name: str) -> Any:
    """What the entry point of that name stands for. Raises UnsupportedError."""
    word, kind = _KINDS[group]
    try:
        thing = _entries(group)[name].load()
    except Exception as error:
        raise UnsupportedError(f"{word} {name} cannot be imported: {error!r}") from error
    if not isinstance(thing, kind):
        raise UnsupportedError(
            f"entry point {name} of {group} is a {type(thing).__name__}: expected {kind.__name__}"
        )
    if isinstance(thing, ExchangePart | ExpertsPart) and thing.name != name:
        raise UnsupportedError(
            f"entry point {name} of {group} calls itself {thing.name!r}: give both one name"
        )
    return thing


def _known(group: str, name: str) -> None:
    if name not in _entries(group):
        word, _ = _KINDS[group]
        raise InputError(f"no {word} called {name!r}: a pair is {_pairs_in_words()}")


def _pairs_in_words() -> str:
    return f"exchange{JOINT}experts of {', '.join(exchanges())} and {', '.join(experts())}"


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    """Read once: looking through everything that is installed can take as long as a whole layer call."""
    return {entry.name: entry for entry in entry_points(group=group)}


def _aliases(registered: str) -> tuple[str, ...]:
    number, _, bare = registered.partition("_")
    return (number, bare) if number.isdigit() else ()
