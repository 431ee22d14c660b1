"""An entry of the tuning file as a row of `epmoe tune`'s table: the tile of each product and its time."""

from typing import Any

COLUMNS = ("gate_up", "us", "down", "us")


def cells(entry: dict[str, Any]) -> list[str]:
    """By `COLUMNS`; "-" for a time that the entry does not hold, as entries that ship with the stage may not."""
    took = entry.get("microseconds", {})
    return [
        cell
        for which in ("gate_up", "down")
        for cell in (_tile(entry[which]), str(took.get(which, "-")))
    ]


def _tile(config: dict[str, Any]) -> str:
    flags = "".join(f" {flag}" for flag in ("swap_ab", "tma", "tma_rows") if config.get(flag))
    blocks = "{block_m}x{block_n}x{block_k} s{num_stages} w{num_warps}".format(**config)
    return blocks + flags
