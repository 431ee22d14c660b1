"""The steps that this stage fuses, each of which can be switched off alone to see what it is worth.

Switched off, a step runs as its twin: the same mathematics in plain torch operators, as in the stage before, or as
kernels of their own.
"""

from collections.abc import Iterable

from epmoe.core import registry
from epmoe.core.errors import InputError
from epmoe.core.layer_spec import LayerSpec

FUSIONS: dict[str, str] = {
    "router": "logits become ids and weights inside the pack kernel, not in operators of their own",
    "pack": "one kernel writes all send rows, not four strided copies and a mask",
    "metadata": "one kernel builds offsets, order and tiles, not a sort and a search",
    "gather": "the GEMM reads received rows in place, not from a copy made by a prepare kernel",
    "reduce": "one kernel adds the K places of a row, not K torch operators",
    "merge": "one kernel adds the EP rows of a token, not EP torch operators",
    "overlap": "a kernel starts while its predecessor drains (programmatic dependent launch)",
}


OF_PART: dict[str, frozenset[str]] = {
    "fused_capacity": frozenset({"router", "pack", "merge", "overlap"}),
    "triton": frozenset({"metadata", "gather", "reduce", "overlap"}),
}


def of(spec: LayerSpec) -> frozenset[str]:
    """The fusions that are on in a layer: those that its parts offer, without those that its options leave out."""
    parts = registry.load(spec.stage).parts or ()
    offered = frozenset().union(*(OF_PART.get(part.name, ()) for part in parts))
    return parse(spec.options.get("without", ""), offered)


def parse(without: object, offered: Iterable[str] = tuple(FUSIONS)) -> frozenset[str]:
    """The fusions that stay on, given those to leave out: a name, several with commas, or an iterable of names."""
    names = without.split(",") if isinstance(without, str) else without
    if not isinstance(names, Iterable):
        raise InputError(f"without={without!r}: give names of fusions, such as 'pack,merge'")
    off, there = {str(name).strip() for name in names} - {""}, [f for f in FUSIONS if f in offered]
    unknown = sorted(off - set(there))
    if unknown:
        raise InputError(
            f"without={', '.join(unknown)}: no such fusion; there are {', '.join(there)}"
        )
    return frozenset(there) - off
