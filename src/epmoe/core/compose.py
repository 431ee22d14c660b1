"""An exchange and experts become a stage: what both can do, what they promise each other, whose options count.

STAGE = compose(EXCHANGE, EXPERTS, summary="...")               a good combination, under a name of its own
build("fixed_capacity+triton", ...)                             any two parts that fit, by their names
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from epmoe.core import registry
from epmoe.core.capabilities import Capabilities
from epmoe.core.contract import misfits
from epmoe.core.errors import UnsupportedError
from epmoe.core.memory import LayerSize, Memory
from epmoe.core.parts import ExchangePart, ExpertsPart
from epmoe.core.registry import Stage
from epmoe.core.split import SplitLayer

# How a capability of a pair follows from those of its exchange and its experts.
EXCHANGE_ALONE = ("transports", "placements", "maskable", "max_ranks")  # experts see none of it
IN_COMMON = ("dtypes", "devices")
BOTH = ("graph_capturable", "deterministic", "batch_invariant")
EITHER = ("interpreted_on_cpu",)
SMALLER = ("max_tokens", "max_topk", "max_experts")
LARGER = ("min_arch",)
ALL = ("packages",)


def compose(exchange: ExchangePart, experts: ExpertsPart, summary: str | None = None) -> Stage:
    """The stage in which `exchange` delivers to `experts`.

    Raises:
        UnsupportedError: the parts do not fit; names both, every promise that is at odds, and what would pair.
    """
    reasons = reasons_against_pair(exchange, experts)
    if reasons:
        raise UnsupportedError(
            f"{exchange.name}+{experts.name} do not fit: {'; '.join(reasons)}. {_what_would_pair(exchange, experts)}"
        )
    return Stage(
        summary=summary or f"{exchange.summary}; {experts.summary}",
        capabilities=combined(exchange.capabilities, experts.capabilities),
        factory=partial(SplitLayer, exchange=exchange, experts=experts),
        options=_options(exchange, experts),
        switches=tuple({**dict.fromkeys(exchange.switches), **dict.fromkeys(experts.switches)}),
        overflow=exchange.overflow,
        tuner=experts.tuner,
        memory=_memory(exchange, experts),
        grants=_grants(exchange, experts),
        reasons_against=experts.reasons_against,
        parts=(exchange, experts),
    )


def reasons_against_pair(exchange: ExchangePart, experts: ExpertsPart) -> list[str]:
    """Every reason why the two cannot work together, in words; empty when they can."""
    reasons = [
        f"{exchange.name} delivers {name}={_short(value)}, {experts.name} takes {_listed(taken)}"
        for name, value, taken in misfits(exchange.delivers, experts.accepts)
    ]
    for name in IN_COMMON:
        one, other = (getattr(part.capabilities, name) for part in (exchange, experts))
        if not set(one) & set(other):
            reasons.append(
                f"{exchange.name} serves {name} {_listed(one)}, {experts.name} {_listed(other)}: none in common"
            )
    return reasons


def combined(one: Capabilities, other: Capabilities) -> Capabilities:
    """What a pair can do, given its exchange's capabilities and its experts'."""
    rules = {
        **dict.fromkeys(EXCHANGE_ALONE, lambda a, b: a),
        **dict.fromkeys(IN_COMMON, lambda a, b: tuple(x for x in a if x in b)),
        **dict.fromkeys(BOTH, lambda a, b: a and b),
        **dict.fromkeys(EITHER, lambda a, b: a or b),
        **dict.fromkeys(
            SMALLER, lambda a, b: min((x for x in (a, b) if x is not None), default=None)
        ),
        **dict.fromkeys(
            LARGER, lambda a, b: max((x for x in (a, b) if x is not None), default=None)
        ),
        **dict.fromkeys(ALL, lambda a, b: tuple(dict.fromkeys((*a, *b)))),
    }
    values = {name: rule(getattr(one, name), getattr(other, name)) for name, rule in rules.items()}
    return Capabilities(**values)


def _options(exchange: ExchangePart, experts: ExpertsPart) -> dict[str, str]:
    """Of both; an option that both read means one thing, said once."""
    both = {**exchange.options}
    for name, meaning in experts.options.items():
        known = both.setdefault(name, meaning)
        if known != meaning:
            both[name] = f"{known}; {meaning}"
    return both


def _grants(exchange: ExchangePart, experts: ExpertsPart) -> dict[str, Mapping[str, object]]:
    """A flag can be switched on where each part has it, or has options that switch it on."""
    granted: dict[str, Mapping[str, object]] = {}
    for flag in BOTH:
        needed: dict[str, object] = {}
        for part in (exchange, experts):
            if getattr(part.capabilities, flag):
                continue
            if flag not in part.grants:
                break
            needed |= part.grants[flag]
        else:
            if needed:
                granted[flag] = needed
    return granted


def _memory(exchange: ExchangePart, experts: ExpertsPart) -> Any:
    first, second = exchange.memory, experts.memory
    if first is None or second is None:
        return None

    def memory(size: LayerSize) -> Memory:
        return first(size) + second(size, exchange.delivers)

    return memory


def _what_would_pair(exchange: ExchangePart, experts: ExpertsPart) -> str:
    """The registered parts that fit one of the two."""
    with_exchange = [
        name
        for name, part in registry.loaded(registry.EXPERTS).items()
        if isinstance(part, ExpertsPart) and not reasons_against_pair(exchange, part)
    ]
    with_experts = [
        name
        for name, part in registry.loaded(registry.EXCHANGES).items()
        if isinstance(part, ExchangePart) and not reasons_against_pair(part, experts)
    ]
    return (
        f"{exchange.name} goes with the experts {', '.join(with_exchange) or '(none registered)'}; "
        f"{experts.name} with the exchanges {', '.join(with_experts) or '(none registered)'}"
    )


def _listed(values: tuple) -> str:
    return " or ".join(map(_short, values))


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")
