"""In checked mode a part that breaks a promise is named, with the promise, on every rank."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from epmoe.core import groups
from epmoe.core.cases import Case
from epmoe.core.conformance.program import caught
from epmoe.core.contract import DeliveryCheck
from epmoe.core.errors import ContractError
from epmoe.core.groups import EPGroup
from epmoe.core.shape import MoEShape
from epmoe.core.split import Exchange, Experts, Rows
from epmoe.core.verify import bring, build_case

SHAPE = MoEShape(hidden=8, intermediate=8, experts=4, topk=2)


class Spoilt(Exchange):
    """A right exchange whose deliveries go through `spoil`."""

    def __init__(self, right: Exchange, spoil: Callable[[Rows], Rows]):
        self.right, self.spoil = right, spoil

    def dispatch(self, x_TH, topk_ids_TK, topk_weights_TK, capacity):
        rows, state = self.right.dispatch(x_TH, topk_ids_TK, topk_weights_TK, capacity)
        return self.spoil(rows), state

    def combine(self, y_RH, state):
        return self.right.combine(y_RH, state)


def _first_slot(rows: Rows, slot: int) -> Rows:
    slots_RJ = rows.slots_RJ.clone()
    slots_RJ[0, 0] = slot
    return replace(rows, slots_RJ=slots_RJ)


def _without_the_first_row(rows: Rows) -> Rows:
    return Rows(x_RH=rows.x_RH[1:], slots_RJ=rows.slots_RJ[1:], weights_RJ=rows.weights_RJ[1:])


BROKEN = {
    "x is (8, 8) torch.float64": lambda r: replace(r, x_RH=r.x_RH.double()),
    "x is (8, 7)": lambda r: replace(r, x_RH=r.x_RH[:, 1:]),
    "slots is (8, 2) torch.int64": lambda r: replace(r, slots_RJ=r.slots_RJ.long()),
    "slots is (8, 1)": lambda r: replace(r, slots_RJ=r.slots_RJ[:, :1]),
    "weights is (8, 2) torch.float16": lambda r: replace(r, weights_RJ=r.weights_RJ.half()),
    "weights is (7, 2)": lambda r: replace(r, weights_RJ=r.weights_RJ[1:]),
    "places were delivered: at most EP * C * K = 16": lambda r: Rows(
        x_RH=r.x_RH.repeat(2, 1),
        slots_RJ=r.slots_RJ.repeat(2, 1),
        weights_RJ=r.weights_RJ.repeat(2, 1),
    ),
    "layout='contiguous', but x has strides": lambda r: replace(r, x_RH=r.x_RH.repeat(1, 2)[:, :8]),
    "an id is 2: slots of this rank are -1 to 1": lambda r: _first_slot(r, 2),
    "an id is -2": lambda r: _first_slot(r, -2),
}


class Wrong(Experts):
    """Experts that answer with what `spoil` makes of the right answer."""

    def __init__(self, right: Experts, spoil: Callable[[Tensor], Tensor]):
        self.right, self.spoil = right, spoil

    def __call__(self, rows):
        return self.spoil(self.right(rows))


UNFIT = {
    "y is (8, 8) torch.float16": lambda y: y.half(),
    "y is (7, 8)": lambda y: y[1:],
    "y has strides (1, 8)": lambda y: y.T.contiguous().T,
}


def told(group: EPGroup, broken: str | None = None, unfit: str | None = None) -> str:
    """What a layer of two ranks says in checked mode when a part of the last one breaks a promise."""
    case = Case(stage="00", shape=SHAPE, tokens=((3, 4),), check=True)
    layer: Any = build_case(group, case)
    if group.rank == group.size - 1 and broken:
        layer.exchange = Spoilt(layer.exchange, BROKEN[broken])
    if group.rank == group.size - 1 and unfit:
        layer.experts = Wrong(layer.experts, UNFIT[unfit])
    said = caught(lambda: layer(*bring(group, case, 0)))
    layer.close()
    return said


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_delivery_is_named_on_every_rank(pool, broken):
    said = pool.run(told, broken, ranks=2)
    assert said[0] == said[1]
    assert said[0].startswith("ContractError: rank 1: all_gather+loop: "), said
    assert broken in said[0]


@pytest.mark.parametrize("unfit", UNFIT)
def test_an_unfit_answer_is_named_on_every_rank(pool, unfit):
    said = pool.run(told, None, unfit, ranks=2)
    assert said[0] == said[1]
    assert unfit in said[0]


def test_sizes_that_follow_the_routing_are_not_static():
    """R of one capacity may not change: told at the second call."""
    group, case = (
        groups.single("cpu"),
        Case(stage="00", shape=SHAPE, tokens=((3,), (3,)), check=True),
    )
    layer: Any = build_case(group, case)
    layer(*bring(group, case, 0))
    layer.exchange = Spoilt(layer.exchange, _without_the_first_row)
    with pytest.raises(ContractError, match="sizes='static', but R is 2 and was 3"):
        layer(*bring(group, case, 0))


def test_a_place_that_cannot_be_empty():
    """An exchange that says "never" and delivers -1."""
    group = groups.single("cpu")
    case = Case(stage="00", shape=SHAPE, tokens=((3,),), kind="masked", check=True)
    layer: Any = build_case(group, case)
    never = replace(layer.parts[0].delivers, empty="never")
    layer._promises = DeliveryCheck(layer.spec, never)
    with pytest.raises(ContractError, match=r"empty='never', but an id is -1: .* are 0 to 3"):
        layer(*bring(group, case, 0))


def test_unchecked_layers_look_at_nothing():
    """Outside of checked mode a delivery is not read: no host waits for it."""
    group, case = groups.single("cpu"), Case(stage="00", shape=SHAPE, tokens=((3,),))
    layer: Any = build_case(group, case)
    layer.exchange = Spoilt(
        layer.exchange, lambda rows: replace(rows, weights_RJ=rows.weights_RJ.double())
    )
    layer(*bring(group, case, 0))
