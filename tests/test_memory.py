"""Pairs of parts add up what each of them says of its memory; see the suite's test_memory for stages."""

from functools import partial

import pytest
import torch

from epmoe.core import registry
from epmoe.core.conformance.test_memory import holds_what_it_says
from epmoe.core.launch import RankPool


def run_on(pool: RankPool, program, case):
    return pool.run(program, case, ranks=case.ranks)


@pytest.mark.parametrize("pair", registry.pairs())
def test_pairs_hold_what_they_say(pool, pair):
    assert registry.load(pair).memory is not None
    holds_what_it_says(partial(run_on, pool), pair, torch.float16, 2)
