"""Parts by name: what fits, what does not and why, and what a pair can do."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from epmoe.core import compose as composing
from epmoe.core import groups, registry
from epmoe.core.capabilities import Capabilities, Spec
from epmoe.core.cases import Case
from epmoe.core.compose import combined, compose
from epmoe.core.contract import Accepts, Delivers
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.experts import EXPERTS
from epmoe.core.memory import Memory
from epmoe.core.parts import ExchangePart, ExpertsPart
from epmoe.core.shape import MoEShape
from epmoe.core.verify import build_case
from epmoe.core.workspace import Workspace

SHAPE = MoEShape(hidden=8, intermediate=8, experts=4, topk=2)
DELIVERS = Delivers(places="topk", sizes="static")


def exchange(**changes: Any) -> ExchangePart:
    right = registry.load("00").parts
    assert right is not None
    return replace(right[0], name="theirs", **changes)


def experts(**changes: Any) -> ExpertsPart:
    return replace(EXPERTS, name="ours", **changes)


# ---- names


def test_a_pair_is_a_name_like_any_other():
    assert registry.resolve("fixed_capacity+loop") == "fixed_capacity+loop"
    stage = registry.load("fixed_capacity+loop")
    assert stage.summary.endswith("; loop over the local experts")
    assert [part.name for part in stage.parts or ()] == ["fixed_capacity", "loop"]


def test_stages_are_pairs_and_pairs_are_the_others():
    """Every two registered parts that fit are there once: as a stage, or as a pair."""
    stages = [registry.load(name) for name in registry.names()]
    composed = {"+".join(part.name for part in stage.parts) for stage in stages if stage.parts}
    everything = {f"{x}+{y}" for x in registry.exchanges() for y in registry.experts()}
    assert composed | set(registry.pairs()) == everything
    assert not composed & set(registry.pairs())
    ours = {"all_gather+loop", "variable_a2a+loop", "fixed_capacity+grouped"}
    assert ours | {"fused_capacity+triton"} <= composed


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nobody+loop", "no exchange called 'nobody': a pair is exchange+experts of all_gather"),
        ("all_gather+nobody", "no experts called 'nobody'"),
        ("all_gather+", "no experts called ''"),
        ("all_gather+loop+loop", "no experts called 'loop+loop'"),
        ("loop+all_gather", "no exchange called 'loop'"),
        ("all_gather", "or a pair exchange+experts of all_gather"),
    ],
)
def test_unknown_parts_are_named(name, message):
    with pytest.raises(InputError) as told:
        registry.resolve(name)
    assert message in str(told.value)


class Entry:
    """An entry point that names `thing`."""

    def __init__(self, name: str, thing: object):
        self.name, self.thing = name, thing

    def load(self) -> object:
        if isinstance(self.thing, Exception):
            raise self.thing
        return self.thing


@pytest.fixture
def register(monkeypatch) -> Callable[[str, str, object], None]:
    """register(group, name, thing): as if a package outside had this entry point."""
    entries = registry._entries
    more: dict[str, dict[str, Entry]] = {}
    monkeypatch.setattr(
        registry, "_entries", lambda group: {**entries(group), **more.get(group, {})}
    )

    def register(group: str, name: str, thing: object) -> None:
        more.setdefault(group, {})[name] = Entry(name, thing)

    return register


def test_strangers_pair_with_everybody(register):
    register(registry.EXCHANGES, "theirs", exchange())
    assert {"theirs+loop", "theirs+grouped"} <= set(registry.pairs())
    group = groups.single("cpu")
    layer = build_case(group, Case(stage="theirs+grouped", shape=SHAPE, tokens=((2,),)))
    assert layer.describe()["exchange"] == "theirs"


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (exchange(), "calls itself 'theirs': give both one name"),
        (EXPERTS, "is a ExpertsPart: expected ExchangePart"),
        (ImportError("no such library"), "exchange other cannot be imported: ImportError"),
    ],
)
def test_wrong_entry_points_are_told(register, thing, message):
    register(registry.EXCHANGES, "other", thing)
    with pytest.raises(UnsupportedError, match=message):
        registry.load("other+loop")
    assert "other+loop" not in registry.pairs()


# ---- what does not fit

WRONG = {
    "ids": ("global", "slots"),
    "weighed_by": ("source", "experts"),
    "places": ("one", "topk"),
    "sizes": ("data", "static"),
    "layout": ("strided", "contiguous"),
    "empty": ("minus_one", "never"),
    "sums": (torch.bfloat16, torch.float32),
}


def test_every_promise_has_a_wrong_pair():
    assert set(WRONG) == {field.name for field in fields(Delivers)}
    assert set(WRONG) == {field.name for field in fields(Accepts)}


@pytest.mark.parametrize("promise", WRONG)
def test_a_wrong_pair_is_refused_with_the_reason(promise):
    delivered, taken = WRONG[promise]
    one = {"places": "one"} if promise == "weighed_by" else {}
    theirs = exchange(delivers=replace(DELIVERS, **{**one, promise: delivered}))
    with pytest.raises(UnsupportedError) as told:
        compose(theirs, experts(accepts=replace(Accepts(), **{promise: (taken,)})))
    text = str(told.value)
    assert text.startswith("theirs+ours do not fit: "), text
    values = [str(value).removeprefix("torch.") for value in (delivered, taken)]
    assert f"theirs delivers {promise}={values[0]}, ours takes {values[1]}" in text


def test_all_reasons_and_what_would_pair():
    """Two promises and a dtype at odds: three reasons in one message, and who fits whom."""
    theirs = exchange(delivers=Delivers(places="topk", sizes="static", ids="global"))
    half = Capabilities(dtypes=(torch.float16,), devices=("cpu",))
    ours = experts(
        accepts=Accepts(places=("one",)), capabilities=replace(half, dtypes=(torch.float64,))
    )
    with pytest.raises(UnsupportedError) as told:
        compose(theirs, ours)
    text = str(told.value)
    assert "ids=global" in text
    assert "places=topk" in text
    assert "dtypes float32 or bfloat16 or float16, ours float64: none in common" in text
    assert "theirs goes with the experts (none registered)" in text
    assert "ours with the exchanges (none registered)" in text


def test_the_fix_lists_who_would_fit(register):
    """And the page about mixing quotes it word for word."""
    mine = replace(EXPERTS, name="mine", accepts=Accepts(sizes=("data",)))
    register(registry.EXPERTS, "mine", mine)
    with pytest.raises(UnsupportedError) as told:
        registry.load("fixed_capacity+mine")
    text = str(told.value)
    assert "fixed_capacity goes with the experts grouped, loop, triton" in text
    assert "mine with the exchanges variable_a2a" in text
    page = Path(__file__).parents[1] / "docs" / "use" / "mix.md"
    assert text in " ".join(page.read_text().split())


def test_build_refuses_it_too(register):
    register(registry.EXPERTS, "ours", experts(accepts=Accepts(sizes=("data",))))
    group = groups.single("cpu")
    with pytest.raises(UnsupportedError, match=r"rank 0: fixed_capacity\+ours do not fit"):
        build_case(group, Case(stage="fixed_capacity+ours", shape=SHAPE, tokens=((2,),)))


def test_weights_at_the_source_need_one_place():
    with pytest.raises(InputError, match="weighed_by='source' with places='topk'"):
        Delivers(places="topk", sizes="static", weighed_by="source")


# ---- what a pair can do


def test_every_capability_has_a_rule():
    rules = (
        *composing.EXCHANGE_ALONE, *composing.IN_COMMON, *composing.BOTH, *composing.EITHER,
        *composing.SMALLER, *composing.LARGER, *composing.ALL,
    )  # fmt: skip
    assert sorted(rules) == sorted(field.name for field in fields(Capabilities))


def test_a_pair_can_what_both_can():
    one = Capabilities(
        transports=("nccl",), placements=("contiguous",), graph_capturable=True, deterministic=True,
        min_arch=(8, 0), max_topk=32, max_tokens=64, max_ranks=8, packages=("one", "both"),
    )  # fmt: skip
    other = Capabilities(
        dtypes=(torch.bfloat16, torch.float64), devices=("cuda",), deterministic=True, batch_invariant=True,
        min_arch=(9, 0), max_topk=8, packages=("both", "other"), interpreted_on_cpu=True,
    )  # fmt: skip
    assert combined(one, other) == Capabilities(
        dtypes=(torch.bfloat16,), devices=("cuda",), transports=("nccl",), placements=("contiguous",),
        deterministic=True, min_arch=(9, 0), max_topk=8, max_tokens=64, max_ranks=8, interpreted_on_cpu=True,
        packages=("one", "both", "other"),
    )  # fmt: skip


def test_only_packed_exchanges_play_loopback():
    for name in [*registry.names(), *registry.pairs()]:
        stage = registry.load(name)
        reasons = stage.capabilities.reasons_against(Spec(transport="loopback"))
        packed = stage.parts is not None and "capacity" in stage.parts[0].name
        assert bool(reasons) != packed, (name, reasons)


def test_options_grants_and_memory_of_both():
    exact, plain = {"batch_invariant": {"exact": True}}, {"batch_invariant": {"plain": 1}}
    theirs = exchange(
        options={"shared": "a", "one": "b"}, grants=exact, memory=lambda s: Memory(1, 2)
    )
    ours = experts(
        options={"shared": "a", "two": "c"}, grants=plain, memory=lambda s, d: Memory(10, 20)
    )
    both = compose(theirs, ours)
    assert both.options == {"shared": "a", "one": "b", "two": "c"}
    assert both.grants == {"batch_invariant": {"exact": True, "plain": 1}}
    assert both.memory is not None
    assert both.memory(None) == Memory(11, 22)  # pyright: ignore[reportArgumentType]
    assert compose(exchange(grants=exact), experts()).grants == {}, "experts cannot"
    assert compose(exchange(memory=None), ours).memory is None, "unknown"


def test_an_option_that_two_parts_understand_differently_says_both():
    both = compose(exchange(options={"tile": "of rows"}), experts(options={"tile": "of columns"}))
    assert both.options == {"tile": "of rows; of columns"}


def test_fusions_of_the_other_part_are_unknown():
    """`without` names fusions that are there: the exchange's are not, where torch packs."""
    group, options = groups.single("cpu"), {"without": "pack"}
    case = Case(stage="fixed_capacity+triton", shape=SHAPE, tokens=((2,),), options=options)
    with pytest.raises(
        InputError, match="without=pack: no such fusion; there are metadata, gather"
    ):
        build_case(group, case)


def test_a_shared_workspace_is_nobodys_to_clear():
    workspace, group = Workspace(), groups.single("cpu")
    case = Case(stage="fixed_capacity+loop", shape=SHAPE, tokens=((2,),))
    own, shared = (
        build_case(group, case),
        build_case(group, replace(case, options={"workspace": workspace})),
    )
    assert (
        own.describe()["workspace_bytes"]
        == shared.describe()["workspace_bytes"]
        == workspace.nbytes
    )
    own.close()
    shared.close()
    assert own.describe()["workspace_bytes"] == 0
    assert workspace.nbytes > 0
