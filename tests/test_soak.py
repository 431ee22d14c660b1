"""The check of many replays sees what is wrong; eager calls stand for the replays here, which need a GPU."""

import pytest
import torch

from epmoe.core import groups
from epmoe.core.cases import Case
from epmoe.core.conformance import soak_program
from epmoe.core.draws import KINDS
from epmoe.core.shape import MoEShape
from epmoe.core.verify import tolerance

SHAPE = MoEShape(hidden=16, intermediate=24, experts=8, topk=2)
CASE = Case(stage="00", shape=SHAPE, tokens=((8,),), capacity=8)
REPLAYS = len(KINDS) + 1


def soaked(monkeypatch, spoil=None) -> soak_program.Soak:
    """The soak of a right layer, whose second result `spoil` changes in place."""

    class Eager:
        def __init__(self, layer, max_tokens):
            self.layer, self.max_tokens, self.calls = layer, max_tokens, 0

        def __call__(self, *arguments):
            y_TH = self.layer(*arguments, max_tokens=self.max_tokens)
            self.calls += 1
            if spoil is not None and self.calls == 2:
                spoil(y_TH)
            return y_TH

        def close(self):
            pass

    monkeypatch.setattr(soak_program, "GraphedCall", Eager)
    return soak_program.soak(groups.single(), CASE, REPLAYS)


def test_right_replays_are_right(monkeypatch):
    found = soaked(monkeypatch)
    assert (found.replays, found.unlike_eager) == (REPLAYS, 0)
    assert 0 < found.error <= tolerance(torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_value_that_is_no_number_is_infinitely_wrong(monkeypatch, value):
    def spoil(y_TH):
        y_TH[1, 3] = value

    assert soaked(monkeypatch, spoil).error == float("inf")


def test_a_result_without_any_number_is_infinitely_wrong(monkeypatch):
    assert soaked(monkeypatch, lambda y_TH: y_TH.fill_(float("nan"))).error == float("inf")


def test_swapped_rows_are_wrong(monkeypatch):
    def spoil(y_TH):
        y_TH[:2] = y_TH[:2].flip(0)

    assert soaked(monkeypatch, spoil).error > 0.01
