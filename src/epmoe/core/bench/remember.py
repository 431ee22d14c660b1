"""`epmoe bench --remember`: what a run found goes where `build("auto", ...)` looks."""

import os

from epmoe.core import measured, own_file, registry
from epmoe.core.bench.results import Measured, Point, Result
from epmoe.core.commands.terminal import check_file
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.measured import Comparison, Situation
from epmoe.core.ranks.transport import choose_here


def comparisons(result: Result) -> list[Comparison]:
    """One for each T at which at least two stages, with their default options, have a time."""
    found = []
    for point in result.points:
        times = {name: one.median_us for name, one in point.subjects.items() if _counts(name, one)}
        if len(times) > 1:
            found.append(_comparison(result, point, times))
    return found


def keep(result: Result) -> str:
    """Write the comparisons into the user's own file; says how many, and where."""
    found = comparisons(result)
    path = measured.keep(found)
    return f"{len(found)} comparisons of stages in {path}: `auto` looks there"


def check(device: str, ep: int, loopback: bool, placement: str = "contiguous") -> None:
    """Before anything is measured: raise where the result could not be kept.

    Raises:
        InputError: the file is broken, about another device or cannot be written, or another map than the contiguous
            one is measured.
        UnsupportedError: ranks share a GPU, so their times are not those of ranks with a GPU each.
    """
    if placement != "contiguous":
        raise InputError(
            f"placement={placement}: `auto` looks for times of contiguous maps, leave --remember out"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1 if loopback else ep))
    choice = choose_here(here, device)
    if choice.shared:
        raise UnsupportedError(
            f"{choice.reason}: times of a shared GPU say nothing about one GPU a rank, leave --remember out"
        )
    path = own_file.default_file()
    check_file(path, makes_folders=True)
    measured.read(path)
    own_file.check_device(own_file.load(path), own_file.device_name(choice.device_type), path)


def _counts(name: str, one: Measured) -> bool:
    whole = ":" not in name  # see `subjects.variant`
    stage = name in registry.names() or registry.JOINT in name
    return whole and stage and one.error is None and one.median_us is not None


def _comparison(result: Result, point: Point, times: dict) -> Comparison:
    setting, device = result.setting, result.machine["device"]
    shape = setting["shape"]
    return Comparison(
        device="cpu" if device.startswith("cpu,") else device,  # provenance adds the architecture
        situation=Situation(
            transport=setting["transport"],
            dtype=setting["dtype"],
            hidden=shape["hidden"],
            intermediate=shape["intermediate"],
            experts=shape["experts"],
            topk=shape["topk"],
            ranks=setting["ep"],
            tokens=point.tokens,
        ),
        microseconds=times,
        created=result.created,
        versions={name: result.machine[name] for name in ("torch", "triton")},
    )
