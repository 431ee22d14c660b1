"""Gates of `epmoe bench`: a wrong subject gets an error, never a time."""

import dataclasses

import pytest
import torch

from epmoe.core.bench.chains import Chain
from epmoe.core.bench.gates import GateError, check_router, expectations
from epmoe.core.bench.method import HostClock, clock_for
from epmoe.core.bench.point import Plan, draw_records, measure_point, replays_of
from epmoe.core.bench.results import Result, validate
from epmoe.core.bench.routers import make_router
from epmoe.core.bench.run import Config, _base, setting_record, with_draws
from epmoe.core.bench.subjects import GroupedProduct, StageSubject, make_subject
from epmoe.core.bench.workload import Routing, layer_weights, logits_for, make_draw
from epmoe.core.errors import InputError
from epmoe.core.groups import single
from epmoe.core.launch import launch
from epmoe.core.placement import contiguous
from epmoe.core.routing import route
from epmoe.core.shape import SHAPES

TINY = SHAPES["tiny"]
CONFIG = Config(shape="tiny", ep=2, loopback=True, tokens=(5,), draws=2, layers=2, rows=3)


def setting_of(config=CONFIG, group=None):
    return with_draws(_base(group or single("cpu"), config), config, 5, 0, config.draws)


class Scaled(GroupedProduct):
    """2% off in one layer: what a broken epilogue looks like."""

    def call(self, layer, draw):
        return super().call(layer, draw) * (1.02 if layer == 1 else 1.0)


class WrongDraw(GroupedProduct):
    """Reads the peers' rows of another draw: what a stale buffer looks like."""

    def call(self, layer, draw):
        return super().call(layer, 0)


class Drifting(GroupedProduct):
    """Declares determinism, and adds noise far below every tolerance."""

    def call(self, layer, draw):
        y_TH = super().call(layer, draw)
        return y_TH * (1 + 1e-7 * torch.rand(()))


class Broken(GroupedProduct):
    def call(self, layer, draw):
        raise ZeroDivisionError("nothing to divide by")


def measured(subject, names=("mine", "grouped_mm")):
    setting = setting_of()
    clock = HostClock(setting.group)
    result = Result(
        created="now",
        command="test",
        machine=dict.fromkeys(
            ("git_sha", "git_dirty", "device", "driver", "torch", "triton", "nccl", "vllm")
        ),
        setting=setting_record(setting, CONFIG, clock),
        ceiling={"read_bytes_per_second": 1e10},
    )
    plan = Plan(
        names=names,
        blocks=2,
        replays=2,
        rows=3,
        weight_seed=0,
        sweep=0,
        configs=None,
        tuning=setting_of,
        make=lambda name, s, c: subject(s) if name == "mine" else make_subject(name, s, c),
    )
    point, _ = measure_point(clock, setting, plan, result)
    result.points.append(point)
    return point, result


def test_a_right_subject_gets_a_time_and_its_gates():
    point, result = measured(GroupedProduct)
    one = point.subjects["mine"]
    assert one.error is None
    assert len(one.samples_us) == 2
    assert 0 < one.gates["oracle_error"] <= one.gates["oracle_limit"]
    assert [(r.of, r.to) for r in point.ratios] == [("mine", "grouped_mm")]
    assert validate(result) == []


@pytest.mark.parametrize(
    ("subject", "gate"),
    [
        (Scaled, "oracle (eager): layer 1"),
        (WrongDraw, "oracle (eager): layer 0"),
        (Drifting, "other bits, and determinism is declared"),
        (Broken, "ZeroDivisionError: nothing to divide by"),
    ],
)
def test_a_sabotaged_subject_gets_an_error_and_no_time(subject, gate):
    point, result = measured(subject)
    one = point.subjects["mine"]
    assert gate in one.error
    assert one.samples_us == []
    assert one.median_us is None
    assert point.subjects["grouped_mm"].samples_us, "the others are measured all the same"
    assert point.ratios == []
    assert validate(result) == []


def test_drift_below_tolerance_is_allowed_where_no_determinism_is_declared():
    class Honest(Drifting):
        deterministic = False

    point, _ = measured(Honest)
    assert point.subjects["mine"].error is None


def test_a_refusal_keeps_its_reason():
    point, _ = measured(GroupedProduct, names=("01", "vllm-default", "vllm-agrs", "grouped_mm"))
    assert "transport loopback is not among" in point.refused["01"]
    assert "CUDA" in point.refused["vllm-default"]
    assert "needs several ranks" in point.refused["vllm-agrs"]
    assert list(point.subjects) == ["grouped_mm"]


def test_the_stage_in_loopback_receives_the_rows_of_its_draw():
    setting = setting_of()
    subject = StageSubject("02", setting)
    first, second, again = (Chain(subject, draw).outputs for draw in (0, 1, 0))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], second[0])
    subject.close()


def _expected_by_rank(group):
    config = Config(shape="tiny", ep=2, tokens=(5,), draws=1, layers=1, rows=2)
    setting = with_draws(_base(group, config), config, 5, 0, 1)
    found = expectations(setting, 0, 2)[0][0]
    everything = layer_weights(TINY, range(TINY.experts), 0, 0, torch.float32, group.device)
    own = setting.draws[0].sources[group.rank]
    from epmoe.reference.oracle import oracle

    rows = found.rows_S
    whole = oracle(own.x_TH[rows], own.ids_TK[rows], own.weights_TK[rows], everything)
    return torch.equal(found.y_SH, whole.y_TH), torch.equal(found.terms_S, whole.terms_T)


def test_ranks_draw_each_others_experts_again_for_the_oracle():
    assert launch(_expected_by_rank, ranks=2, device="cpu") == [(True, True)] * 2


def test_logits_make_the_router_choose_the_drawn_ids():
    draw = make_draw(
        TINY, contiguous(32, 4), 33, Routing(kind="zipf"), 7, torch.float32, torch.device("cpu")
    )
    ids = torch.stack([torch.randperm(32)[:4] for _ in range(20)])
    chosen, _ = route(logits_for(ids, 32, 1), TINY.router, 4)
    assert torch.equal(chosen.sort(dim=1).values, ids.int().sort(dim=1).values)
    assert sum(draw.load.assignments) == 4 * 33 * 4
    assert draw.load.active[0] >= 1


def test_the_router_is_the_same_for_all_and_named():
    router, name = make_router("auto", TINY, torch.device("cpu"))
    assert name == "torch"
    logits = torch.randn(3, 32)
    assert torch.equal(router(logits, None)[0], route(logits, TINY.router, 4)[0])
    with pytest.raises(InputError, match="are for GPUs"):
        make_router("02", TINY, torch.device("cpu"))
    with pytest.raises(InputError, match="no router kernel"):
        make_router("02", TINY, torch.device("cuda"))


def test_a_wrong_common_router_ends_the_run():
    setting = setting_of()
    check_router(setting)

    def swapped(logits, bias):
        ids, weights = setting.router(logits, bias)
        return ids, weights.flip(1)

    def shifted(logits, bias):
        ids, weights = setting.router(logits, bias)
        return (ids + 1) % 32, weights

    with pytest.raises(GateError, match="weights are off"):
        check_router(dataclasses.replace(setting, router=swapped))
    with pytest.raises(GateError, match="other ids"):
        check_router(dataclasses.replace(setting, router=shifted))


def test_a_draw_without_work_for_the_rank_is_refused():
    config = Config(
        shape="tiny", ep=2, loopback=True, tokens=(1,), routing=Routing(kind="one_rank"), draws=1
    )
    setting = with_draws(_base(single("cpu"), config), config, 1, 0, 1)
    record = setting_record(setting, config, clock_for(setting.group))
    result = Result(created="now", command="epmoe bench", machine={}, setting=record)
    with pytest.raises(InputError, match="play another rank"):
        draw_records(setting, result)


def test_replays_are_even():
    setting = setting_of()
    assert [replays_of("eager", setting, n) for n in (1, 2, 5)] == [2, 2, 4]


def test_the_router_that_subjects_share_on_a_gpu_is_a_stages_kernel():
    """Found without falling back, and equal to the reference: what makes subjects comparable must not go by itself."""
    shape = SHAPES["tiny"]
    shared, name = make_router("auto", shape, torch.device("cuda"))
    assert name == "03_fused_triton kernel"
    logits_TE = torch.randn(5, shape.experts, generator=torch.Generator().manual_seed(0))
    bias_E = torch.randn(shape.experts, generator=torch.Generator().manual_seed(1)) / 10
    ids_TK, weights_TK = shared(logits_TE, bias_E)
    wanted_ids, wanted_weights = route(logits_TE, shape.router, shape.topk, bias_E)
    assert torch.equal(ids_TK, wanted_ids)
    torch.testing.assert_close(weights_TK, wanted_weights, rtol=1e-5, atol=1e-6)
