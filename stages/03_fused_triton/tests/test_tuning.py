"""Tile sizes: looked up exactly, from the nearest that was measured, or by rule; and measured on the expert group."""

import json
import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: @triton.jit looks at it

from epmoe.core import groups, own_file, tune
from epmoe.core.conformance.program import caught
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.groups import EPGroup
from epmoe.core.layer import build
from epmoe.core.packed_rows import RowLayout
from epmoe.core.placement import contiguous
from epmoe.core.shape import SHAPES, MoEShape
from epmoe.core.weights import random_weights
from epmoe.fused_triton import tuner, tuning
from epmoe.fused_triton.kernels import DeviceLimits, GemmConfig, LayerConfig

H200 = "NVIDIA H200"
RECORD = tuning.Situation(
    device=H200,
    dtype="bfloat16",
    hidden=4096,
    intermediate=2048,
    experts=72,
    ranks=4,
    topk=8,
    tokens=8,
)
LIMITS = DeviceLimits(232448, tma=True)


def look_up(situation: tuning.Situation, tokens: int, pinned: bool = False) -> tuning.Choice:
    return tuning.Tuning(situation, LIMITS, 2, pinned).choice(tokens)


def test_what_was_measured_is_found_exactly():
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128):
        assert look_up(RECORD, tokens).source == "exact", tokens


@pytest.mark.parametrize(
    ("change", "tokens", "source"),
    [
        pytest.param({}, 12, "nearest", id="between-two-sizes"),
        pytest.param({"experts": 144, "ranks": 2}, 8, "nearest", id="half-the-ranks"),
        pytest.param({"hidden": 64, "intermediate": 96}, 8, "rule", id="a-tiny-layer"),
        pytest.param({"dtype": "float32"}, 8, "rule", id="another-dtype"),
        pytest.param({"device": "NVIDIA B200"}, 8, "rule", id="another-gpu"),
    ],
)
def test_what_was_not_measured_says_where_it_comes_from(change, tokens, source):
    assert look_up(replace(RECORD, **change), tokens).source == source


def test_pinned_tiles_are_the_same_for_every_number_of_tokens():
    pinned = {look_up(RECORD, tokens, pinned=True).config for tokens in (1, 128, 8192)}
    assert len(pinned) == 1
    assert len({look_up(RECORD, tokens).config for tokens in (1, 128, 8192)}) > 1


@pytest.mark.parametrize("gpu", [H200, "NVIDIA H100"])  # measured, and by rule
def test_a_warm_up_meets_every_configuration_that_serving_may_need(gpu):
    whole = replace(RECORD, device=gpu, tokens=1500)
    warmed = tuning.Tuning(whole, LIMITS, 2).warmup_capacities()
    assert set(warmed) <= set(range(1, 1501))
    configs = {look_up(whole, tokens).config for tokens in warmed}
    assert {look_up(whole, tokens).config for tokens in range(1, 1501)} == configs
    assert len(configs) > 2, "more than those of 1 and C, or this shows nothing"


def test_a_warm_up_compiles_small_kernels_of_every_size_and_nothing_on_a_cpu():
    """Metadata is compiled for the next power of two of all slots, other kernels for short and long calls."""
    pinned = tuning.Tuning(replace(RECORD, tokens=1500), LIMITS, 2, pinned=True)
    assert pinned.warmup_capacities() == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    interpreted = tuning.Tuning(replace(RECORD, device="cpu"), LIMITS, 2)
    assert interpreted.warmup_capacities() == ()


@pytest.mark.parametrize(
    ("name", "warmed"), [("03", (1, 2, 4, 6)), ("variable_a2a+triton", (1, 6))]
)
def test_a_layer_warms_what_its_tuning_names_where_capacities_decide(name, warmed):
    weights = random_weights(SMALL, range(4))
    layer: Any = build(name, SMALL, weights, contiguous(4, 1), groups.single(), 6)
    layer.experts.tuning = tuning.Tuning(replace(RECORD, tokens=6), LIMITS, 2)
    assert sorted(set(layer.warmup_capacities())) == list(warmed)


def test_every_shipped_entry_fits_its_gpu():
    shipped = tuning.entries(H200)
    assert len(shipped) >= 8
    for situation, config in shipped.items():
        for product, tiles in ((config.gate_up, 2), (config.down, 1)):
            assert product.shared_bytes(tiles, 2) <= LIMITS.shared_memory, situation


def test_the_users_own_file_comes_first(tmp_path, monkeypatch):
    mine = LayerConfig(GemmConfig(num_stages=2), GemmConfig(num_stages=2))
    entry = {
        "for": {k: v for k, v in vars(RECORD).items() if k != "device"},
        "versions": {},
        "gate_up": mine.gate_up.to_dict(),
        "down": mine.down.to_dict(),
    }
    path = tmp_path / "own.json"
    own_file.add(own_file.load(path), own_file.TILES, H200, entry, path)
    monkeypatch.setenv(own_file.VARIABLE, str(path))
    tuning.entries.cache_clear()
    try:
        assert look_up(RECORD, 8) == tuning.Choice(mine, "exact")
    finally:
        tuning.entries.cache_clear()


def test_a_broken_file_of_the_user_is_told_with_the_fix(tmp_path, monkeypatch):
    path = tmp_path / "own.json"
    path.write_text("{")
    monkeypatch.setenv(own_file.VARIABLE, str(path))
    tuning.entries.cache_clear()
    with pytest.raises(InputError, match=r"own.json is no tuning file.*move it away"):
        look_up(RECORD, 8)


# ---- measuring

SMALL = MoEShape(hidden=16, intermediate=16, experts=4, topk=2)
REQUEST = tune.Request(
    shape=SMALL,
    ranks=2,
    rank=None,
    tokens=2,
    dtype=torch.float32,
    candidates=3,
    repeats=1,
    layers=1,
)


def measured(group: EPGroup, request: tune.Request, veto: int | None) -> tuple[dict, dict]:
    """Tune with made-up times: a tile's columns are its microseconds; rank `veto` fails on the narrowest tiles."""
    seen: dict[str, set[int]] = {"gate_up": set(), "down": set()}

    def seconds(group, bench, which, config, repeats) -> tuple[float, str]:
        seen[which].add(config.block_n)
        if veto == group.rank and config.block_n == 16:
            return math.inf, "RuntimeError: no room"
        return config.block_n * 1e-6, ""

    truth, tuner._try = tuner._try, seconds
    try:
        return tuner.tune(group, request), seen
    finally:
        tuner._try = truth


@pytest.mark.parametrize("veto", [None, 1])
def test_the_fastest_that_runs_on_every_rank_wins(pool, veto):
    """Without a veto the narrowest tile; with one, the next: and all ranks return the same entry."""
    many = replace(REQUEST, candidates=40)
    (first, seen), (second, _) = pool.run(measured, many, veto, ranks=2)
    assert first == second
    assert first["failures"] == ({} if veto is None else {"RuntimeError: no room": first["failed"]})
    assert first["failed"] == (0 if veto is None else 2)
    for which in ("gate_up", "down"):
        columns = sorted(seen[which])
        assert len(columns) > 1
        assert first[which]["block_n"] == (columns[0] if veto is None else columns[1])


def test_real_times_make_an_entry_that_a_layer_finds(pool):
    entry = pool.run(tuner.tune, REQUEST, ranks=2, timeout=120)[0]
    device = entry.pop("device")
    assert entry["tried"] == 2 * REQUEST.candidates
    assert all(0 < us < math.inf for us in entry["microseconds"].values())
    data = json.loads(json.dumps({"device": device, "entries": [entry]}))
    (found,) = tuning.read_entries(data, device)
    assert (found.tokens, found.experts, found.ranks) == (2, 2, 2)
    assert entry["gate_up"]["block_m"] == entry["down"]["block_m"]


def all_fail(group: EPGroup, request: tune.Request) -> str:
    truth, tuner._try = tuner._try, lambda *_: (math.inf, "RuntimeError: no room")
    try:
        return caught(lambda: tuner.tune(group, request))
    finally:
        tuner._try = truth


def test_when_nothing_runs_every_rank_says_why(pool):
    said = pool.run(all_fail, REQUEST, ranks=2)
    assert len(set(said)) == 1
    assert said[0].startswith("UnsupportedError: no pair of products runs on every rank")
    assert "no room" in said[0]


def test_candidates_fit_and_begin_with_the_rule():
    group = EPGroup(0, 1, torch.device("cpu"), "single")
    wanted = replace(REQUEST, ranks=1, rank=0, candidates=50, shape=SHAPES["tiny"])
    for which, tiles in (("gate_up", 2), ("down", 1)):
        found = list(tuner.candidates(group, wanted, which))
        assert len(found) == len(set(found)) <= 50
        assert all(c.shared_bytes(tiles, 4) <= 65536 for c in found[1:])


def test_the_fastest_tiles_try_other_schedules_and_keep_what_helps(monkeypatch):
    """Made-up times: TMA for rows halves them, a persistent grid takes a tenth more, the best order of tiles is 8."""

    def seconds(group, bench, which, config, repeats) -> tuple[float, str]:
        if config.block_r:
            return math.inf, "RuntimeError: no room"
        return config.block_m * (1 - config.tma_rows / 2 + config.waves / 10) + abs(config.group_m - 8), ""  # fmt: skip

    alone, one = EPGroup(0, 1, torch.device("cpu"), "single"), replace(REQUEST, ranks=1, rank=0)
    monkeypatch.setattr(tuner, "_try", seconds)
    search = tuner.Search(alone, tuner._prepare(alone, one), "down", 1)
    for block_m in (16, 32, 64):
        search.score(GemmConfig(block_m, tma=True))
    search.reschedule(LIMITS, itemsize=2)
    assert search.best[16][1] == GemmConfig(16, tma=True, tma_rows=True, group_m=8)
    assert search.best[32][1] == GemmConfig(32, tma=True, tma_rows=True, group_m=8)
    assert search.best[64][1] == GemmConfig(64, tma=True), "only the two fastest go on"
    assert search.reasons == {"RuntimeError: no room": 2}
    assert tuner.schedules(DeviceLimits(65536)) == [], "interpreted: nothing to order"


def test_rows_lie_in_memory_as_an_exchange_delivers_them():
    """Tuned on rows side by side, long prefills got tiles that were slow in a layer."""
    alone, one = EPGroup(0, 1, torch.device("cpu"), "single"), replace(REQUEST, ranks=1, rank=0)
    rows = tuner._prepare(alone, one).rows
    layout = RowLayout(SMALL.hidden, SMALL.topk, torch.float32)
    assert rows.x_RH.stride() == (layout.row_bytes // 4, 1)
    assert layout.row_bytes > SMALL.hidden * 4
    assert rows.slots_RJ.shape == rows.weights_RJ.shape == (2, SMALL.topk)
    assert ((rows.slots_RJ >= -1) & (rows.slots_RJ < SMALL.experts)).all()


# ---- the file


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "deep" / "t.json"
    entry = {"for": {"tokens": 1}, "versions": {"triton": "3"}, "gate_up": {}, "down": {}}
    own_file.add(own_file.load(path), own_file.TILES, "gpu", entry, path)
    data = own_file.load(path)
    assert tune.matches(data["entries"][0], {"for": {"tokens": 1}, "versions": {"triton": "3"}})
    assert not tune.matches(data["entries"][0], {"for": {"tokens": 1}, "versions": {"triton": "4"}})
    own_file.add(data, own_file.TILES, "gpu", {**entry, "versions": {"triton": "4"}}, path)
    assert len(own_file.load(path)["entries"]) == 1, "a newer version replaces the older"
    assert [p.name for p in path.parent.iterdir()] == ["t.json"]


def test_files_and_stages_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("[]")
    with pytest.raises(InputError, match="is no tuning file"):
        own_file.load(path)
    entry = {"for": {}, "versions": {}, "gate_up": {}, "down": {}}
    with pytest.raises(InputError, match="is for gpu, this is other"):
        own_file.add({"device": "gpu", "entries": []}, own_file.TILES, "other", entry, path)
    with pytest.raises(UnsupportedError, match="01_variable_a2a has nothing to tune"):
        tune.tuner_of("01")
