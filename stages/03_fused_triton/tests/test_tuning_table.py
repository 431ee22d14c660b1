"""What `epmoe tune` shows of an entry."""

import json
from pathlib import Path

import pytest

from epmoe.core.tune import tuner_of
from epmoe.fused_triton import tuning_table

SHIPPED = sorted((Path(tuning_table.__file__).parent / "configs").glob("*.json"))
TILE = {"block_m": 16, "block_n": 128, "block_k": 64, "num_stages": 3, "num_warps": 4}


def test_a_row_says_tiles_switches_and_times():
    swapped = TILE | {"swap_ab": True, "tma": False, "tma_rows": True}
    entry = {"gate_up": TILE, "down": swapped, "microseconds": {"gate_up": 1.5, "down": 2.0}}
    cells = tuner_of("03").cells(entry)
    assert cells == ["16x128x64 s3 w4", "1.5", "16x128x64 s3 w4 swap_ab tma_rows", "2.0"]
    assert tuner_of("03").cells({"gate_up": TILE, "down": TILE})[1::2] == ["-", "-"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_entry_fills_the_columns(path):
    tuner = tuner_of("03")
    for entry in json.loads(path.read_text())["entries"]:
        assert len(tuner.cells(entry)) == len(tuner.columns)
