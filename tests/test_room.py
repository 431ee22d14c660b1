"""Weights that do not fit into a machine's memory are refused before they are drawn, on every rank alike."""

from types import SimpleNamespace

import pytest

from epmoe.core import room
from epmoe.core.bench import run as bench_run
from epmoe.core.bench.run import Config
from epmoe.core.errors import InputError
from epmoe.core.groups import single

GIB = 2**30


def ranks_on(hosts: list[str], frees: list[float | None], device: str = "cpu") -> SimpleNamespace:
    """A group whose ranks say that they are on these machines, with so much memory free."""
    said = list(zip(hosts, frees, strict=True))
    return SimpleNamespace(
        device=SimpleNamespace(type=device), all_gather_objects=lambda _mine: said
    )


def check(group, layers: int = 4, gib: float = 2.0) -> None:
    room.check_room(group, "glm-5.3-flash", layers, int(gib * GIB), "--layers")


def test_ranks_of_one_machine_count_together():
    check(ranks_on(["a", "b"], [12.0, 12.0]))
    words = r"needs 20\.0 GiB for 4 layers of glm-5\.3-flash on 2 ranks .* 11\.5 are free: use --layers 2 or --shape"
    with pytest.raises(InputError, match=words):
        check(ranks_on(["a", "a"], [12.0, 11.5]))


def test_any_machine_that_is_full_refuses_on_all_ranks():
    with pytest.raises(
        InputError,
        match=r"1 layer of .* on 1 rank of this machine, 1\.0 are free: use --shape tiny",
    ):
        check(ranks_on(["a", "b"], [30.0, 1.0]), layers=1)


def test_nothing_is_refused_on_a_gpu_or_where_nobody_can_tell():
    check(ranks_on(["a"], [0.0], device="cuda"))
    check(ranks_on(["a"], [None]))


def test_bench_draws_no_weights_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(room, "available_memory_gib", lambda: 0.001)
    monkeypatch.setattr(bench_run, "layer_weights", lambda *_: pytest.fail("weights were drawn"))
    config = Config(shape="tiny", ep=2, loopback=True, tokens=(1,), subjects=("grouped_mm",))
    with pytest.raises(InputError, match=r"4 layers of tiny on 1 rank .*use --shape tiny"):
        bench_run.run(single("cpu"), config)
