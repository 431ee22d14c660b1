"""Expert maps: who owns what, and back again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epmoe.core.errors import InputError
from epmoe.core.placement import contiguous, explicit, round_robin

QUIET = settings(max_examples=100, deadline=None, derandomize=True, database=None)


@QUIET
@given(st.integers(1, 9), st.integers(1, 40), st.data())
def test_12B_global_to_local_and_back(ranks, experts, data):
    """12B: every expert is owned once, and slot lookup is the inverse of experts_of."""
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    for placement in (
        contiguous(experts, ranks),
        round_robin(experts, ranks),
        explicit(owners, ranks),
    ):
        held = [placement.experts_of(rank) for rank in range(ranks)]
        assert sorted(e for mine in held for e in mine) == list(range(experts))
        for e in range(experts):
            assert held[placement.owners[e]][placement.slots[e]] == e
        assert placement.counts() == tuple(map(len, held))
        assert placement.owner_table().tolist() == list(placement.owners)
        assert placement.slot_table().tolist() == list(placement.slots)


@pytest.mark.parametrize(
    ("experts", "ranks", "counts"),
    [
        (30, 8, (4, 4, 4, 4, 4, 4, 3, 3)),
        (5, 2, (3, 2)),
        (8, 3, (3, 3, 2)),
        (3, 4, (1, 1, 1, 0)),
    ],
)
def test_5C_uneven_split(experts, ranks, counts):
    """5C: the first ranks hold one more; nobody is owned by a rank outside the group."""
    assert contiguous(experts, ranks).counts() == counts
    assert round_robin(experts, ranks).counts() == counts


def test_toy_maps():
    """The worked example of the module's docstring."""
    assert (contiguous(4, 2).owners, contiguous(4, 2).slots) == ((0, 0, 1, 1), (0, 1, 0, 1))
    assert (round_robin(4, 2).owners, round_robin(4, 2).slots) == ((0, 1, 0, 1), (0, 0, 1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: contiguous(0, 2), "experts=0"),
        (lambda: round_robin(4, 0), "ranks=0"),
        (lambda: explicit([0, 2], 2), "expert 1 is placed on rank 2"),
        (lambda: explicit([0, -1], 2), "expert 1 is placed on rank -1"),
        (lambda: explicit([], 2), "at least one expert"),
        (lambda: contiguous(4, 2).experts_of(2), "rank=2"),
    ],
)
def test_bad_maps_are_named(make, message):
    with pytest.raises(InputError, match=message):
        make()
