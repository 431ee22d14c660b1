"""The user's own file of measurements: tile sizes of `epmoe tune`, times of stages of `epmoe bench --remember`.

    {"device": "NVIDIA H200", "entries": [tile sizes], "stages": [times]}

Each entry has the situation that it was made for under "for". One file is about one kind of device.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from epmoe.core.errors import InputError
from epmoe.core.reading import parse_json, read_text, write_whole

VARIABLE = "EPMOE_TUNING"  # names the file, which is read besides those that ship with a stage
TILES, TIMES = "entries", "stages"


def default_file() -> Path:
    """$EPMOE_TUNING, or a file in the user's cache folder."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "epmoe" / "tuning.json"


def device_name(device: torch.device | str) -> str:
    """How measurements call a device: a GPU by its name, any CPU "cpu"."""
    where = torch.device(device)
    return torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"


def load(path: Path) -> dict[str, Any]:
    """The file's content; an empty one where there is none. Raises InputError for something else."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, no tuning file: name a file with {VARIABLE}")
    if not path.is_file():
        return {"device": None, TILES: [], TIMES: []}
    text = read_text(path, "tuning")
    try:
        data = parse_json(text)
        data = {"device": data["device"], TILES: data[TILES], TIMES: data.get(TIMES, [])}
        for section in (TILES, TIMES):
            if not all(isinstance(entry["for"], dict) for entry in data[section]):
                raise ValueError(f"{section} need a situation each")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no tuning file: {error!r}; move it away, or name another with {VARIABLE}"
        ) from error
    return data


def check_device(data: dict[str, Any], device: str, path: Path) -> None:
    """Raise InputError where the file is about another device."""
    if data["device"] not in (None, device):
        raise InputError(
            f"{path} is for {data['device']}, this is {device}: name another with --out or {VARIABLE}"
        )


def add(data: dict[str, Any], section: str, device: str, entry: dict[str, Any], path: Path) -> None:
    """Put the entry in and write the file in one step; an older one for the same situation goes."""
    check_device(data, device, path)
    data["device"] = device
    data[section] = [one for one in data[section] if one["for"] != entry["for"]] + [entry]
    write_whole(path, json.dumps(data, indent=1) + "\n")
