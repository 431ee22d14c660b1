"""Choosing a stage: every kind of reason, what was measured, and `auto` on several ranks."""

import sys

import pytest
import torch
from tests.stage_makers import stage

from epmoe.core import registry
from epmoe.core.capabilities import Spec
from epmoe.core.choosing import LADDER_ORDER, Verdict, candidates, merge, select
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.memory import Memory, in_words, parse_bytes
from epmoe.core.shape import SHAPES, MoEShape
from epmoe.core.weights import ExpertWeights, random_weights

SLOW = stage(deterministic=True)
FAST = stage(
    dtypes=(torch.bfloat16,),
    devices=("cuda",),
    min_arch=(9, 0),
    transports=("single", "nccl"),
    placements=("contiguous",),
    graph_capturable=True,
    max_tokens=128,
    max_topk=8,
    max_experts=256,
    max_ranks=8,
    options=("steady",),
    grants={"batch_invariant": {"steady": True}},
    memory=lambda size: Memory(size.ranks * size.capacity * size.shape.hidden, 1000),
)
TINY = SHAPES["tiny"]


def test_the_last_rung_that_can_is_chosen_with_reasons():
    stages = {"00_slow": SLOW, "01_other": SLOW, "02_fast": FAST}
    found = select(Spec(dtype=torch.float32, device="cpu"), stages, ())
    assert (found.chosen, found.by) == ("01_other", LADDER_ORDER)
    assert found.reasons["00_slow"] == ["could serve this, but 01_other is the later rung"]
    assert found.reasons["02_fast"] == [
        "dtype torch.float32 is not among torch.bfloat16",
        "device cpu is not among cuda",
    ]
    assert select(Spec(dtype=torch.bfloat16, device="cuda"), stages, ()).chosen == "02_fast"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Spec(dtype=torch.float16), "dtype torch.float16 is not among torch.bfloat16"),
        (Spec(device="cpu"), "device cpu is not among cuda"),
        (Spec(arch=(8, 0)), "compute capability (8, 0) is below (9, 0)"),
        (Spec(transport="gloo"), "transport gloo is not among single, nccl"),
        (Spec(placement="explicit"), "placement explicit is not among contiguous"),
        (Spec(tokens=129), "tokens per rank=129 is over the limit of 128"),
        (Spec(topk=9), "topk=9 is over the limit of 8"),
        (Spec(experts=257), "experts=257 is over the limit of 256"),
        (Spec(shape=SHAPES["glm-5.3-flash"]), "experts=288 is over the limit of 256"),
        (Spec(ranks=9), "ranks=9 is over the limit of 8"),
        (Spec(deterministic=True), "is not deterministic"),
        (Spec(options={"colour": "red"}), "has no option colour"),
        (
            Spec(memory=4000, shape=TINY, ranks=2, tokens=16, dtype=torch.bfloat16),
            "buffers may take 4.0 KiB for good and 1,000 B in a call, over the limit of 3.9 KiB",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Spec) else "",
)
def test_every_kind_of_reason(spec, reason):
    with pytest.raises(UnsupportedError, match="no stage can serve") as caught:
        select(spec, {"fast": FAST}, ())
    assert f"fast: {reason}" in str(caught.value)


def test_a_package_that_is_missing_is_a_reason():
    """Looked for, not imported: a stage is often only considered."""
    wants = stage(packages=("json", "no_such_package"))
    found = select(Spec(), {"00_slow": SLOW, "01_wants": wants}, ())
    assert found.chosen == "00_slow"
    assert found.reasons["01_wants"] == [
        "needs no_such_package, which is not installed: pip install no_such_package"
    ]


def test_without_triton_a_gpu_gets_the_rung_before(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as where it is not installed
    gpu = Spec(dtype=torch.bfloat16, device="cuda", arch=(9, 0), transport="nccl")
    found = select(gpu, comparisons=())
    assert found.chosen == "02_fixed_capacity"
    assert found.reasons["03_fused_triton"] == [
        "needs triton, which is not installed: pip install triton"
    ]


def test_limits_that_are_met_are_no_reason():
    spec = Spec(
        dtype=torch.bfloat16, device="cuda", arch=(9, 0), transport="nccl", placement="contiguous",
        tokens=128, ranks=8, shape=TINY, graph_capturable=True, options={"steady": False},
        memory=8 * 128 * TINY.hidden + 1000,
    )  # fmt: skip
    assert select(spec, {"fast": FAST}, ()).chosen == "fast"


def test_batch_invariance_as_declared_and_as_granted():
    """What an option grants is asked for with that option; without one it is a reason."""
    found = select(Spec(batch_invariant=True), {"00_slow": SLOW, "01_fast": FAST}, ())
    assert (found.chosen, found.options) == ("01_fast", {"steady": True})
    assert found.reasons["00_slow"] == ["is not batch invariant"]
    assert select(Spec(), {"fast": FAST}, ()).options == {}
    with pytest.raises(UnsupportedError) as caught:
        select(Spec(batch_invariant=True, options={"steady": False}), {"fast": FAST}, ())
    assert "is not batch invariant, would be batch invariant with steady=True" in str(caught.value)


def test_a_stage_that_does_not_know_its_memory_cannot_promise_it():
    spec = Spec(memory=10**12, shape=TINY, ranks=2, tokens=16, dtype=torch.bfloat16)
    found = select(spec, {"01_slow": SLOW, "00_fast": FAST}, ())
    assert found.reasons["01_slow"] == ["does not say how much memory its buffers take"]
    with pytest.raises(InputError, match="a limit of memory needs shape, ranks, tokens and dtype"):
        select(Spec(memory=1, ranks=2), {"fast": FAST}, ())


def test_interpreted_kernels_come_last_on_a_cpu_only():
    stages = {"00_slow": SLOW, "01_kernels": stage(interpreted_on_cpu=True, graph_capturable=True)}
    found = select(Spec(device="cpu"), stages, ())
    assert found.chosen == "00_slow"
    assert found.reasons["01_kernels"] == [
        "could serve this, but its kernels are interpreted on a CPU"
    ]
    assert select(Spec(device="cuda"), stages, ()).chosen == "01_kernels"
    assert select(Spec(device="cpu", graph_capturable=True), stages, ()).chosen == "01_kernels"


def test_a_stranger_is_taken_where_no_rung_can():
    stages = {"stranger": stage(batch_invariant=True), "00_slow": SLOW}
    found = select(Spec(), stages, ())
    assert found.chosen == "00_slow"
    assert found.reasons["stranger"] == [
        "could serve this, but nothing was measured that puts it before 00_slow"
    ]
    assert select(Spec(batch_invariant=True), stages, ()).chosen == "stranger"


def test_the_ladder_is_preferred_among_everything_registered():
    names = list(candidates())
    rungs = [name for name in names if name[:1].isdigit()]
    assert names[-len(rungs) :] == rungs == sorted(rungs)


def test_nobody_can_lists_everybody():
    broken = UnsupportedError("stage broken cannot be imported: no module")
    with pytest.raises(UnsupportedError) as caught:
        select(Spec(dtype=torch.float64), {"broken": broken, "slow": SLOW, "fast": FAST}, ())
    said = str(caught.value)
    assert said.startswith("no stage can serve dtype=float64: broken: stage broken cannot")
    assert "slow: dtype torch.float64 is not among" in said
    assert "fast: dtype torch.float64 is not among" in said
    with pytest.raises(
        UnsupportedError, match="no stage can serve anything: no stage is registered"
    ):
        select(Spec(), {}, ())


def test_zero_is_asked_for_too():
    """Unlike a flag that is off, which asks for nothing."""
    spec = Spec(memory=0, tokens=0, shape=TINY, graph_capturable=False)
    assert str(spec).startswith("memory=0 B, tokens=0, ")
    assert "graph_capturable" not in str(spec)


def test_weights_that_no_kernel_reads_leave_the_rung_before():
    """Columns are dense, not rows: as a transposed view of what another library holds."""
    shape = MoEShape(hidden=16, intermediate=8, experts=4, topk=2)
    plain = random_weights(shape, range(4), dtype=torch.bfloat16)
    by_columns = ExpertWeights(plain.w13_E2IH, plain.w2_EHI.mT.contiguous().mT)
    asked = {"dtype": torch.bfloat16, "device": "cuda", "arch": (9, 0), "shape": shape}
    stages = {name: registry.load(name) for name in ("02_fixed_capacity", "03_fused_triton")}
    assert select(Spec(**asked, weights=plain), stages, ()).chosen == "03_fused_triton"
    found = select(Spec(**asked, weights=by_columns), stages, ())
    assert found.chosen == "02_fixed_capacity"
    (reason,) = found.reasons["03_fused_triton"]
    assert "pass w2.contiguous()" in reason


def test_contradictions_are_refused():
    with pytest.raises(InputError, match="topk=3, the shape has 4"):
        Spec(shape=TINY, topk=3)


def test_bytes_in_words_and_back():
    assert parse_bytes("4096") == parse_bytes("4 KiB") == 4096
    assert parse_bytes("1.5GiB") == 3 * 2**29
    assert in_words(3 * 2**29) == "1.5 GiB"
    assert in_words(1023) == "1,023 B"
    for wrong in ("", "many", "1GB", "-1", "1e9"):
        with pytest.raises(InputError, match="give bytes, or a number of KiB"):
            parse_bytes(wrong)


def test_a_group_needs_everyone_able():
    """A reason of one rank counts, with its rank; one of all ranks is said once; who is missing is said."""
    first = {"a": Verdict(reasons=[]), "b": Verdict(reasons=["no"]), "c": Verdict(reasons=[])}
    second = {"a": Verdict(reasons=["is too old"]), "b": Verdict(reasons=["no"])}
    merged = merge([first, second])
    assert [merged[name].reasons for name in "abc"] == [
        ["rank 1: is too old"],
        ["no"],
        ["rank 1: is not registered"],
    ]


def test_pairs_are_candidates_and_parts_that_cannot_be_imported_are_named(monkeypatch):
    """Everything that `build` takes is weighed; nothing that is registered goes missing without a word."""
    real = registry.loaded

    def loaded(group: str) -> dict:
        broken = UnsupportedError(f"{group} broken cannot be imported: no module")
        parts = {} if group == registry.STAGES else {"broken": broken}
        return {**parts, **real(group)}

    monkeypatch.setattr(registry, "loaded", loaded)
    found = candidates()
    assert set(registry.pairs()) <= set(found)
    assert "epmoe.exchanges broken cannot be imported" in str(found["broken+*"])
    assert "epmoe.experts broken cannot be imported" in str(found["*+broken"])
    reasons = select(Spec(), found, ()).reasons
    assert reasons["broken+*"] == ["epmoe.exchanges broken cannot be imported: no module"]
    assert "measured that puts it before" in reasons["fixed_capacity+loop"][0]
