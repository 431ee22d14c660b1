"""`epmoe balance`: a map from counts, or from a checkpoint's own routing on text, with what it gains."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box

from epmoe.core.balance import Balance, balance
from epmoe.core.commands.terminal import Json, deliver, text_of
from epmoe.core.errors import InputError
from epmoe.core.placement import Placement
from epmoe.core.reading import read_json
from epmoe.core.tables import WholeTable

Counts = Mapping[int, Sequence[int]]  # by layer


def balance_command(
    counts: Annotated[
        Path | None,
        typer.Argument(help="JSON: assignments of every expert, a list or one list per layer."),
    ] = None,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 4,
    redundant: Annotated[
        int, typer.Option(min=0, help="Slots of every rank for replicas of hot experts.")
    ] = 0,
    layer: Annotated[int | None, typer.Option(help="Only this layer. All by default.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Count a checkpoint's own routing instead.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="What the model reads; the tour's text by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens of it.")] = 1024,
    json_to: Json = None,
) -> None:
    """Make an expert map from routing counts and show what it gains over the contiguous one. --json writes the map."""
    if (counts is None) == (model is None):
        raise InputError("give a JSON file of counts or --model, one of the two")
    if model is None and text is not None:
        raise InputError("--text is what a model reads: give --model too")
    if counts is not None:
        by_layer = _only(read_counts(counts), layer)
    else:
        assert model is not None
        by_layer = routed_counts(model, layer, text, tokens)
    found = {index: balance(one, ep, redundant) for index, one in by_layer.items()}
    maps = [one.after.as_dict() for one in found.values()]
    deliver(maps[0] if len(maps) == 1 else maps, json_to, render(found))


def read_counts(path: Path) -> Counts:
    """Layer -> assignments of every expert, from a JSON file; a single list is layer 0. Else an InputError."""
    data = read_json(path, "counts")
    if not isinstance(data, list) or not data:
        raise InputError(f"{path} holds no counts: write [12, 0, 7, ...], or one such list a layer")
    layers = data if all(isinstance(one, list) for one in data) else [data]
    for index, one in enumerate(layers):
        if len(one) != len(layers[0]):
            raise InputError(
                f"{path} counts {len(layers[0])} experts in layer 0 and {len(one)} in layer {index}: give every layer "
                "the counts of all its experts, with 0 for one that nobody named"
            )
    return dict(enumerate(layers))


def routed_counts(model: Path, layer: int | None, text: Path | None, tokens: int) -> Counts:
    """How often a checkpoint's tokens name each expert when it reads the text, by MoE layer."""
    from epmoe.core.checkpoints import hidden_states_of_layers, inspect, load_layer
    from epmoe.core.tour import TEXT

    info, words = inspect(model), text_of(text) if text else TEXT
    layers, counts = info.moe_layers if layer is None else (layer,), {}
    for index, x_TH in hidden_states_of_layers(model, layers, words, tokens).items():
        ids_TK, _ = load_layer(model, index, experts=()).router(x_TH)
        counts[index] = torch.bincount(ids_TK.flatten(), minlength=info.shape.experts).tolist()
    return counts


def _only(counts: Counts, layer: int | None) -> Counts:
    if layer is None:
        return counts
    if layer not in counts:
        raise InputError(f"layer={layer}: the file holds layers 0 to {max(counts)}")
    return {layer: counts[layer]}


def render(found: Mapping[int, Balance]) -> WholeTable:
    """Two rows per layer: the contiguous map, and the one to use."""
    table = WholeTable(box=box.SIMPLE_HEAD, caption=_caption(found), caption_justify="left")
    table.numbers("layer")
    table.words("map")
    table.numbers("slots", "fullest\nrank", "mean", "over\nmean")
    for layer, one in found.items():
        table.add_row(str(layer), "contiguous", *_cells(one, one.before))
        if one.gained:
            name = "replicated" if one.after.kind == "replicated" else "balanced"
            table.add_row("", name, *_cells(one, one.after))
    return table


def _cells(one: Balance, placement: Placement) -> tuple[str, ...]:
    loads, held = one.loads(placement), placement.counts()
    slots = str(max(held)) if max(held) == min(held) else f"{min(held)} or {max(held)}"
    mean = sum(loads) / len(loads)
    return slots, f"{max(loads):,.1f}", f"{mean:,.1f}", f"{one.excess(placement):.2f}"


def _caption(found: Mapping[int, Balance]) -> str:
    lines = []
    if gained := [one for one in found.values() if one.gained]:
        before = sum(max(one.loads(one.before)) for one in found.values())
        after = sum(max(one.loads(one.after)) for one in found.values())
        lines.append(f"The fullest rank serves {after / before:.0%} of what it did.")
    if kept := [str(layer) for layer, one in found.items() if not one.gained]:
        where = f"layer {', '.join(kept)}: " if gained else ""
        lines.append(f"{where}nothing is gained, the contiguous map stays.")
    return " ".join(lines)
