"""`epmoe stages`: what is registered; with --why, which of it serves best, and why not the others."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import typer
from rich import box
from rich.console import Group
from rich.text import Text

from epmoe.core import choosing, registry
from epmoe.core.capabilities import Spec
from epmoe.core.errors import EpmoeError, InputError, UnsupportedError
from epmoe.core.measured import Comparison
from epmoe.core.memory import parse_bytes
from epmoe.core.own_file import device_name
from epmoe.core.placement import KINDS
from epmoe.core.ranks.transport import one_device
from epmoe.core.registry import Stage
from epmoe.core.shape import named_shape
from epmoe.core.tables import WholeTable
from epmoe.core.values import named_dtype

SHOWN = ("graph_capturable", "deterministic", "batch_invariant")
TRANSPORTS = ("single", "gloo", "nccl", "loopback")


def refuse_questions(context: typer.Context) -> None:
    """Without --why nothing is asked: raise InputError for an option that would be overlooked."""
    given = [
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        and name != "json_to"
    ]
    if given:
        words = ", ".join("--" + name.replace("_", "-") for name in given)
        raise InputError(f"{words}: only --why looks at that, add it")


def listing() -> tuple[list[dict[str, Any]], WholeTable]:
    """The registered stages and what they declare, as data and as a table, which names the pairs below."""
    table = WholeTable(box=None)
    table.add_column("stage", no_wrap=True)  # names and options are to be typed as they stand
    table.words("idea")
    for name in ("graph", "deterministic", "batch invariant"):
        table.add_column(name, no_wrap=True)
    table.caption = f"And pairs of exchange{registry.JOINT}experts: {', '.join(registry.pairs())}"
    data = []
    for name in registry.names():
        try:
            stage = registry.load(name)
        except EpmoeError as error:
            table.add_row(name, f"[red]{error}[/red]")
            data.append({"stage": name, "error": str(error)})
            continue
        offers = [offer(stage, flag) for flag in SHOWN]
        table.add_row(name, stage.summary, *offers)
        grants = {flag: dict(needed) for flag, needed in stage.grants.items()}
        data.append(
            {
                "stage": name,
                "summary": stage.summary,
                **asdict(stage.capabilities),
                "grants": grants,
            }
        )
    return data, table


def offer(stage: Stage, flag: str) -> str:
    """Whether a stage has a capability: yes, no, or the option that switches it on."""
    if getattr(stage.capabilities, flag):
        return "yes"
    needed = stage.grants.get(flag, {})
    return ", ".join(f"{option}={value}" for option, value in needed.items()) or "no"


def situation(
    *,
    device: str = "auto",
    arch: str | None = None,
    dtype: str = "auto",
    shape: str = "glm-5.3-flash",
    ranks: int | None = None,
    tokens: int = 8,
    transport: str | None = None,
    placement: str = "contiguous",
    graph: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
    maskable: bool = False,
    memory: str | None = None,
) -> Spec:
    """What the options of `epmoe stages --why` ask for; what they leave out, this machine says.

    Raises:
        InputError: a name or a number that is none, or things that exclude each other.
    """
    if placement not in KINDS:
        raise InputError(f"placement={placement!r}: choose one of {', '.join(KINDS)}")
    here = torch.cuda.is_available()
    if device == "auto" and arch:
        device = "cuda"
    elif device != "cuda":  # which may be asked about where there is none
        device = one_device(device)
    if arch and device == "cpu":
        raise InputError(f"arch={arch}: a CPU has no compute capability, leave out one of the two")
    mine = device == "cpu" or (here and not arch)  # this very device, whose measurements count
    ranks = ranks or (torch.cuda.device_count() if device == "cuda" and here else 1)
    return Spec(
        dtype=named_dtype(dtype, device),
        device=device,
        device_name=device_name(device) if mine else None,
        arch=_arch(arch) if arch else _arch_here(device, here),
        transport=_transport(transport, device, ranks),
        placement=placement,
        tokens=tokens,
        ranks=ranks,
        shape=named_shape(shape),
        graph_capturable=graph,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        maskable=maskable,
        memory=parse_bytes(memory) if memory else None,
    )


def why(spec: Spec) -> tuple[dict[str, Any], Group]:
    """The choice for `spec` with every reason, as data and as a table; "chosen" is None where nothing can."""
    data = weigh(spec)
    asked = Text.assemble(("asked for ", "dim"), str(spec))
    return {"asked": str(spec), **data}, Group(asked, _table(data))


def weigh(spec: Spec, comparisons: Sequence[Comparison] | None = None) -> dict[str, Any]:
    """As `choosing.select`, as data; where nothing can, "chosen" is None and the reasons are there all the same."""
    verdicts = choosing.judge(spec, choosing.candidates())
    if any(not verdict.reasons for verdict in verdicts.values()):
        return asdict(choosing.select(spec, comparisons=comparisons))
    reasons = {name: verdict.reasons for name, verdict in verdicts.items()}
    return {"chosen": None, "by": None, "options": {}, "reasons": reasons}


def alike(reasons: Mapping[str, Sequence[str]]) -> list[tuple[list[str], list[str]]]:
    """(names, reasons) of those passed over, with the same reasons together, the preferred ones first."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, why_not in reversed(list(reasons.items())):
        found.setdefault(tuple(why_not), []).append(name)
    return [(names, list(why_not)) for why_not, names in found.items()]


def _table(data: dict[str, Any]) -> WholeTable:
    table = WholeTable(box=box.SIMPLE_HEAD)
    table.words("", "stage", "why")
    if data["chosen"] is not None:
        options = "".join(f", with {name}={value}" for name, value in data["options"].items())
        table.add_row("[green]chosen[/green]", data["chosen"], data["by"] + options)
    for names, reasons in alike(data["reasons"]):
        table.add_row("", "\n".join(names), Text("\n".join(reasons)))
    if data["chosen"] is None:
        table.caption = "No stage can serve this."
    return table


def _arch(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)\.(\d)", text)
    if found is None:
        raise InputError(f"arch={text!r}: give a compute capability, such as 9.0")
    return int(found[1]), int(found[2])


def _arch_here(device: str, here: bool) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if device == "cuda" and here else None


def _transport(asked: str | None, device: str, ranks: int) -> str:
    """As groups would have it; a name that cannot be with this device or so many ranks is refused."""
    usual = "single" if ranks == 1 else "gloo" if device == "cpu" else "nccl"
    if asked is None:
        return usual
    if asked not in TRANSPORTS:
        raise InputError(f"transport={asked!r}: choose one of {', '.join(TRANSPORTS)}")
    if asked not in (usual, "loopback"):
        raise UnsupportedError(
            f"transport={asked!r} with {ranks} rank(s) on {device}: that is {usual}, or loopback"
        )
    return asked
