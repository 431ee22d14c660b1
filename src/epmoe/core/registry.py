"""Stages by name, found through the entry-point group `epmoe.stages` and imported only when used.

A stage of this repository is registered under its folder's name (`01_variable_a2a`) and answers to `variable_a2a` and
`01` as well. A package outside registers the same way, under a name of its own:

    [project.entry-points."epmoe.stages"]
    my_stage = "my_package.layer:STAGE"
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from epmoe.core.capabilities import Capabilities
from epmoe.core.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    from epmoe.core.layer import LayerSpec, MoELayer
    from epmoe.core.memory import LayerSize, Memory
    from epmoe.core.tune import Tuner

GROUP = "epmoe.stages"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What an entry point names.

    Attributes:
        summary: one line: the idea that this stage adds.
        capabilities: what it declares; `build` refuses everything else with the reasons.
        factory: makes the layer from a checked spec.
        options: names of the keyword options that `build` passes on, with their meaning.
        tuner: measures configurations for `epmoe tune`, or None where there is nothing to tune.
        overflow: what calls with more than max_tokens_per_rank tokens do by default, "raise" or "rounds".
        memory: bytes of buffers for layers of a size, with the default options; None where nobody worked them out.
        grants: capability -> the options that switch it on.
    """

    summary: str
    capabilities: Capabilities
    factory: "Callable[[LayerSpec], MoELayer]"
    options: dict[str, str]
    overflow: str = "raise"
    tuner: "Tuner | None" = None
    memory: "Callable[[LayerSize], Memory] | None" = None
    grants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def capabilities_with(self, options: Mapping[str, object]) -> Capabilities:
        """Of a layer that is built with these options."""
        granted = {
            name: True
            for name, needed in self.grants.items()
            if all(options.get(option) == value for option, value in needed.items())
        }
        return replace(self.capabilities, **granted)


def names() -> list[str]:
    """Registered stages in ladder order: numbered ones first, then others by name."""
    return sorted(_entries(), key=lambda name: (not name[:1].isdigit(), name))


def resolve(name: str) -> str:
    """The registered name for `name`, which may also be the bare name or the number. Raises InputError."""
    registered = names()
    matches = [r for r in registered if name in (r, *_aliases(r))]
    if len(matches) != 1:
        what = f"several stages ({', '.join(matches)})" if matches else "no stage"
        raise InputError(f"{what} called {name!r}: choose one of {', '.join(registered)}")
    return matches[0]


def load(name: str) -> Stage:
    """Import a stage. Raises InputError for an unknown name, UnsupportedError when its package cannot be imported."""
    registered = resolve(name)
    try:
        stage = _entries()[registered].load()
    except Exception as error:
        raise UnsupportedError(f"stage {registered} cannot be imported: {error!r}") from error
    if not isinstance(stage, Stage):
        raise UnsupportedError(
            f"entry point {registered} is a {type(stage).__name__}: expected a Stage"
        )
    return stage


def all_capabilities() -> dict[str, Capabilities]:
    """Capabilities of every stage that can be imported here, in ladder order."""
    found = {}
    for name in names():
        try:
            found[name] = load(name).capabilities
        except UnsupportedError:
            continue  # `epmoe stages` lists it with the reason
    return found


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _aliases(registered: str) -> tuple[str, ...]:
    number, _, bare = registered.partition("_")
    return (number, bare) if number.isdigit() else ()
