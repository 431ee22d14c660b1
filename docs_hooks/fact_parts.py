"""Tables about exchanges and experts: what each promises or takes, and what every two of them are together."""

from dataclasses import fields
from typing import Any

from docs_hooks.fact_tables import fact, markdown_table

from epmoe.core import registry
from epmoe.core.capabilities import Capabilities
from epmoe.core.compose import compose, reasons_against_pair
from epmoe.core.contract import Accepts, Delivers


def _words(value: object) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return " or ".join(str(one).removeprefix("torch.") for one in values)


def _parts_table(group: str, side: str, contract: type) -> str:
    """One row a part; a promise that all of them share is left to the text below the table."""
    parts = registry.loaded(group)
    promises = {name: getattr(part, side) for name, part in parts.items()}
    names = [field.name for field in fields(contract)]
    differ = [n for n in names if len({getattr(p, n) for p in promises.values()}) > 1]
    rows = [
        [f"`{name}`", part.summary, *(_words(getattr(promises[name], n)) for n in differ)]
        for name, part in parts.items()
    ]
    one = next(iter(promises.values()))
    alike = ", ".join(f"`{n}` {_words(getattr(one, n))}" for n in names if n not in differ)
    head = ["part", "what it does", *(f"`{n}`" for n in differ)]
    return f"{markdown_table(head, rows, len(head))}\n\nAll of them: {alike}."


@fact
def exchanges_table() -> str:
    """Registered exchanges and what they promise."""
    return _parts_table(registry.EXCHANGES, "delivers", Delivers)


@fact
def experts_table() -> str:
    """Registered experts and what they take."""
    return _parts_table(registry.EXPERTS, "accepts", Accepts)


@fact
def pairs_table() -> str:
    """Every exchange with all experts: the stage that they are, what the pair can do, or why it is none."""
    exchanges, experts = registry.loaded(registry.EXCHANGES), registry.loaded(registry.EXPERTS)
    rows = [
        [f"`{name}`", *(_cell(exchange, some) for some in experts.values())]
        for name, exchange in exchanges.items()
    ]
    return markdown_table(["", *(f"`{name}`" for name in experts)], rows, len(experts) + 1)


def _cell(exchange: Any, experts: Any) -> str:
    reasons = reasons_against_pair(exchange, experts)
    if reasons:
        return f"no: {'; '.join(reasons)}"
    can = compose(exchange, experts).capabilities
    rung = _stages().get((exchange.name, experts.name))
    return " · ".join(([f"**{rung}**"] if rung else []) + _abilities(can))


def _stages() -> dict[tuple[str, str], str]:
    stages = {name: registry.load(name).parts for name in registry.names()}
    return {(parts[0].name, parts[1].name): name for name, parts in stages.items() if parts}


def _abilities(can: Capabilities) -> list[str]:
    words = ["CUDA graphs" if can.graph_capturable else "waits for the host"]
    return words + (["loopback"] if "loopback" in can.transports else [])
