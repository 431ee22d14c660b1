"""The steps that this stage fuses, each of which can be switched off alone to see what it is worth.

Switched off, a step runs as its twin: the same mathematics in plain torch operators, as in the stage before, or as
kernels of their own.
"""

from collections.abc import Iterable

from epmoe.core.errors import InputError

FUSIONS: dict[str, str] = {
    "router": "logits become ids and weights inside the pack kernel, not in operators of their own",
    "pack": "one kernel writes all send rows, not four strided copies and a mask",
    "metadata": "one kernel builds offsets, order and tiles, not a sort and a search",
    "gather": "the GEMM reads received rows in place, not from a copy made by a prepare kernel",
    "reduce": "one kernel adds the K slots of a row, not K torch operators",
    "merge": "one kernel adds the EP rows of a token, not EP torch operators",
    "overlap": "a kernel starts while its predecessor drains (programmatic dependent launch)",
}


def parse(without: object) -> frozenset[str]:
    """The fusions that stay on, given those to leave out: a name, several with commas, or an iterable of names."""
    names = without.split(",") if isinstance(without, str) else without
    if not isinstance(names, Iterable):
        raise InputError(f"without={without!r}: give names of fusions, such as 'pack,merge'")
    off = {str(name).strip() for name in names} - {""}
    unknown = sorted(off - set(FUSIONS))
    if unknown:
        raise InputError(
            f"without={', '.join(unknown)}: no such fusion; there are {', '.join(FUSIONS)}"
        )
    return frozenset(FUSIONS) - off
