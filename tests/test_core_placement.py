"""Expert maps: who owns what, and back again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epmoe.core.errors import InputError
from epmoe.core.expert_tables import ExpertTables
from epmoe.core.placement import (
    Placement,
    contiguous,
    explicit,
    parse_placement,
    replicated,
    round_robin,
)

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
        (lambda: contiguous(4, 2).owners_from(2), "rank=2"),
        (lambda: replicated([(0,), (0, 0)], 2), "expert 1 .* each rank once"),
        (lambda: replicated([(0,), ()], 2), "expert 1 is placed nowhere"),
        (lambda: replicated([(0, 1)], 2).owners, "expert 0 lives on ranks .* owners_from"),
        (lambda: replicated([(0, 1)], 2).slot_table(), "expert 0 lives on ranks .* slots_from"),
        (lambda: contiguous(4, 2).without([2]), "rank 2 cannot be gone"),
        (lambda: contiguous(4, 2).without([0, 1]), "all 2 ranks are gone"),
        (lambda: contiguous(1, 2).without([0]), "no expert is left"),
        (lambda: Placement.from_json("{"), "no placement"),
        (lambda: Placement.from_json("[]"), "several layers"),
        (lambda: Placement.from_json('{"kind": "x", "ranks": 1, "homes": [[0]]}'), "kind='x'"),
        (
            lambda: Placement.from_json('{"kind": "explicit", "ranks": 2, "homes": [[0, 1]]}'),
            "kind='explicit'",
        ),
        (lambda: parse_placement("best", 4, 2), "placement='best'.*round_robin"),
    ],
)
def test_bad_maps_are_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


# ---- replicas

HOMES = [(0, 1), (0,), (1, 2), (2,)]


@st.composite
def maps(draw) -> tuple[Placement, set[int]]:
    """Any map with replicas, and ranks that are gone."""
    ranks = draw(st.integers(1, 6))
    some = st.sets(st.integers(0, ranks - 1), min_size=1)
    homes = draw(st.lists(some, min_size=1, max_size=12))
    gone = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    return replicated([sorted(held) for held in homes], ranks), gone


@QUIET
@given(maps())
def test_a_home_serves_itself_and_the_others_share_alike(drawn):
    """Whoever is gone: the owner holds the expert at that slot; sources without a replica spread evenly."""
    placement, gone = drawn
    held = [placement.experts_of(rank) for rank in range(placement.ranks)]
    seen = [placement.owners_from(source, gone) for source in range(placement.ranks)]
    slots = [placement.slots_from(source, gone) for source in range(placement.ranks)]
    for e, homes in enumerate(placement.homes):
        left = [rank for rank in homes if rank not in gone]
        served = dict.fromkeys(left, 0)
        for source in range(placement.ranks):
            owner, slot = seen[source][e], slots[source][e]
            if not left:
                assert (owner, slot) == (placement.ranks, -1)
                continue
            assert held[owner][slot] == e
            assert source not in left or owner == source
            served[owner] += source not in left
        assert not left or max(served.values()) - min(served.values()) <= 1


@QUIET
@given(maps())
def test_survivors_keep_their_experts(drawn):
    """What `without` says: ranks are renumbered in their order, weights and slots stay as they are."""
    placement, gone = drawn
    living = [rank for rank in range(placement.ranks) if rank not in gone]
    if not any(rank in homes for homes in placement.homes for rank in living):
        with pytest.raises(InputError, match="no expert is left"):
            placement.without(gone)
        return
    smaller = placement.without(gone)
    assert smaller.ranks == len(living)
    for number, rank in enumerate(living):
        assert smaller.experts_of(number) == placement.experts_of(rank)
    assert smaller.lost == tuple(e for e, h in enumerate(placement.homes) if gone.issuperset(h))


def test_worked_replicas():
    """The worked example of the module's docstring."""
    placement = replicated(HOMES, 3)
    assert placement.kind == "replicated"
    assert [placement.owners_from(s) for s in range(3)] == [
        (0, 0, 1, 2),
        (1, 0, 1, 2),
        (0, 0, 2, 2),
    ]
    assert [placement.slots_from(s) for s in range(3)] == [(0, 1, 1, 1), (0, 1, 1, 1), (0, 1, 0, 1)]


def test_kinds_say_what_a_map_is():
    assert replicated([(0,), (1,)], 2).kind == "explicit"
    assert replicated(HOMES, 3).without([1]).kind == "explicit"
    assert replicated(HOMES, 3).without([]) == replicated(HOMES, 3)
    assert contiguous(4, 2).without([]).kind == "contiguous"


def test_files(tmp_path):
    file = tmp_path / "map.json"
    file.write_text(replicated(HOMES, 3).to_json())
    assert parse_placement(str(file), 4, 3) == replicated(HOMES, 3)
    assert parse_placement("round_robin", 4, 3) == round_robin(4, 3)
    with pytest.raises(InputError, match="maps 4 experts on 3 ranks, wanted are 4 on 2"):
        parse_placement(str(file), 4, 2)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "contiguous", "ranks": 2, "homes": [[1], [0], [1], [0]]}',
        '{"kind": "round_robin", "ranks": 2, "homes": [[0], [0], [1], [1]]}',
        '{"kind": "replicated", "ranks": 2, "homes": [[0], [1]]}',
        '{"kind": "explicit", "ranks": 2, "homes": [[0, 1], [1]]}',
        '{"kind": "explicit", "ranks": 2.0, "homes": [[0], [1]]}',
        '{"kind": "explicit", "ranks": true, "homes": [[0], [0]]}',
        '{"kind": "explicit", "ranks": Infinity, "homes": [[0], [1]]}',
        '{"kind": "explicit", "ranks": 2, "homes": [[0.0], [1]]}',
        '{"kind": "explicit", "ranks": 2, "homes": [[false], [true]]}',
        "[" * 100_000,
    ],
)
def test_texts_that_are_no_placement(text):
    with pytest.raises(InputError):
        Placement.from_json(text)


def test_every_kind_survives_a_file():
    for placement in (
        contiguous(5, 2),
        contiguous(2, 5),
        round_robin(5, 2),
        explicit([1, 0, 1], 2),
        replicated(HOMES, 3),
        replicated(HOMES, 3).without([0]),
    ):
        assert Placement.from_json(placement.to_json()) == placement


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "map.json"
    for content in (b"\xff\xfe", b"{"):
        file.write_bytes(content)
        with pytest.raises(InputError, match=str(file)):
            parse_placement(str(file), 4, 2)


@pytest.mark.parametrize("owners", [[0.7, 1.2], [False, True], ["0", "1"]])
def test_owners_are_whole_numbers(owners):
    with pytest.raises(InputError, match="give the whole number of a rank"):
        explicit(owners, 2)
    with pytest.raises(InputError, match="give the whole number of a rank"):
        replicated([[owner] for owner in owners], 2)


def test_owners_of_other_libraries_are_taken():
    assert explicit(torch.tensor([1, 0]), 2).owners == (1, 0)  # pyright: ignore[reportArgumentType]


# ---- tables on the device


def test_tables_change_in_place():
    """What a captured graph reads stays where it is; a mask that is lifted leaves nothing behind."""
    tables = ExpertTables(replicated(HOMES, 3), 1)
    held = (tables.owner_E, tables.slot_E, tables.owner_SE, tables.slot_SE)
    places, before = [t.data_ptr() for t in held], [t.clone() for t in held]
    assert tables.owner_E.tolist() == [1, 0, 1, 2]
    tables.mask({1})
    assert (tables.gone, tables.lost()) == ((1,), ())
    assert tables.owner_SE.tolist() == [[0, 0, 2, 2], [0, 0, 2, 2], [0, 0, 2, 2]]
    assert tables.owner_E.tolist() == [0, 0, 2, 2]
    tables.mask({0, 1})
    assert tables.lost() == (0, 1)
    assert tables.owner_E.tolist() == [3, 3, 2, 2]
    assert tables.slot_E.tolist() == [-1, -1, 0, 1]
    tables.mask(())
    assert [t.data_ptr() for t in held] == places
    assert all(bool((t == b).all()) for t, b in zip(held, before, strict=True))


def test_tables_seen_from_another_rank():
    tables = ExpertTables(replicated(HOMES, 3), 1)
    with tables.seen_from(2):
        assert tables.owner_E.tolist() == [0, 0, 2, 2]
    assert tables.owner_E.tolist() == [1, 0, 1, 2]


def test_renormalised_weights_by_hand():
    """Expert 1 is lost with rank 1. Weights of what is left grow to the same sum; -1 never counted."""
    tables = ExpertTables(contiguous(4, 4), 0)
    tables.mask({1})
    ids_TK = torch.tensor([[0, 1, 2], [1, 1, -1], [0, 2, 3], [1, -1, 3], [-1, -1, -1], [1, 0, 7]])
    nan = float("nan")
    weights_TK = torch.tensor(
        [[1.0, 2.0, 1.0], [1.0, 1.0, 5.0], [0.1, 0.2, 0.3], [3.0, nan, 1.0], [nan, nan, nan], [1.0, 1.0, nan]]
    )  # fmt: skip
    found = tables.renormalise(ids_TK, weights_TK)
    assert found.tolist()[0] == [2.0, 0.0, 2.0]
    assert found.tolist()[1] == [0.0, 0.0, 0.0]
    assert torch.equal(found[2], weights_TK[2])
    assert found.tolist()[3:] == [[0.0, 0.0, 4.0], [0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    alone = torch.cat(
        [tables.renormalise(ids_TK[t : t + 1], weights_TK[t : t + 1]) for t in range(6)]
    )
    assert torch.equal(found, alone)
