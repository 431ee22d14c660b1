"""The limit calculator with replicas and lost experts: what a rank serves depends on who asks."""

import pytest
import torch

from epmoe.core.placement import Placement, contiguous, replicated
from epmoe.core.plan import drawn_load, expected_load, plan
from epmoe.core.shape import named_shape

TOY = named_shape("toy")  # E 4, K 2
MAP = replicated([(0, 1), (0,), (1,), (1,)], 2)  # contiguous, and expert 0 on rank 1 as well
DRAW = [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[2, 3], [0, 3]])]


def test_toy_draw_counted_by_hand():
    """Rank 1's token that names 0 stays at home now: nothing travels from 1 to 0."""
    load = drawn_load(TOY, DRAW, MAP)
    assert load.slots_SD == ((3, 1), (0, 4))
    assert load.hits_SD == ((2, 1), (0, 2))
    assert load.active == (2, 3)


def test_expectation_by_hand():
    """Rank 0 asks itself for 0 and 1, rank 1 asks rank 0 for 1 alone. K/E = 1/2; 3 and 5 tokens."""
    load = expected_load(TOY, 2, (3, 5), MAP)
    assert load.slots_SD == ((3.0, 3.0), (2.5, 7.5))
    assert load.hits_SD[0] == pytest.approx((3 * 5 / 6, 3 * 5 / 6))
    assert load.hits_SD[1] == pytest.approx((5 * 1 / 2, 5 * 1))
    # rank 0: expert 0 by 3 tokens, 1 by 8; rank 1: 0 by 5, 2 and 3 by 8
    half = {n: 1 - 0.5**n for n in (3, 5, 8)}
    assert load.active == pytest.approx((half[3] + half[8], half[5] + 2 * half[8]))


def test_expectation_is_the_mean_of_draws():
    generator = torch.Generator().manual_seed(1)
    draws = [
        [torch.rand(n, 4, generator=generator).topk(2).indices for n in (3, 5)] for _ in range(2000)
    ]
    loads = [drawn_load(TOY, draw, MAP) for draw in draws]
    expected = expected_load(TOY, 2, (3, 5), MAP)
    for name in ("active", "assignments", "hit_tokens"):
        mean = torch.tensor([getattr(load, name) for load in loads]).double().mean(dim=0)
        assert mean.tolist() == pytest.approx(getattr(expected, name), rel=0.03)


def test_lost_experts_ask_nothing_of_anybody():
    smaller = contiguous(4, 3).without([1])  # expert 2 is lost; experts 0 and 1, and 3 are left
    load = expected_load(TOY, 2, 2, smaller)
    assert load.slots_SD == ((2.0, 1.0),) * 2
    assert drawn_load(TOY, DRAW, smaller).slots_SD == ((3, 0), (1, 2))


def test_replicas_take_memory():
    found = plan(TOY, 2, 4, placement=MAP)
    assert (found.placement, [rank.local_experts for rank in found.ranks]) == ("replicated", [2, 3])


class CountedHomes(tuple):
    """Homes that count how often somebody goes through them all."""

    scans = 0

    def __iter__(self):
        type(self).scans += 1
        return super().__iter__()


def test_many_ranks_are_planned_without_a_scan_of_the_map_by_every_rank_for_every_rank():
    """Every source rank asks for its owners, and so the work is EP x E; with one more scan for each pair of ranks, as
    many ranks as these took half a minute, and 1000 of them minutes."""
    ep, shape = 512, named_shape("glm-5.3-flash")
    homes = CountedHomes(contiguous(shape.experts, ep).homes)
    CountedHomes.scans = 0
    found = plan(shape, ep, 1, placement=Placement(homes, ep, "contiguous"))
    assert CountedHomes.scans <= 4 * ep
    assert [rank.local_experts for rank in found.ranks] == [1] * 288 + [0] * (ep - 288)


def test_sums_over_all_ranks_are_added_up_once_for_all_of_them():
    load = expected_load(TOY, 2, (3, 5), MAP)
    assert load.assignments is load.assignments
    assert load.hit_tokens is load.hit_tokens
