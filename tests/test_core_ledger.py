"""The ledger sees every wait, launch and allocation, and counts the same again."""

import pytest
import torch

from epmoe.core import groups, ledger
from epmoe.core.poison import poisoned

X = torch.arange(6.0)
MASK = X > 2
INTS = torch.tensor([0, 2, 2, 1])

WAITS = {
    "item": lambda: X.sum().item(),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "numpy": lambda: X.numpy(),
    "bool": lambda: bool(X[0] < 1),
    "if": lambda: 1 if X[0] < 1 else 0,
    "int": lambda: int(X[1]),
    "float": lambda: float(X[1]),
    "index": lambda: [10, 20, 30][INTS[1]],
    "nonzero": lambda: MASK.nonzero(),
    "one-argument where": lambda: torch.where(MASK),
    "boolean mask": lambda: X[MASK],
    "assignment to a mask": lambda: X.clone().__setitem__(MASK, 0.0),
    "masked_select": lambda: X.masked_select(MASK),
    "unique": lambda: INTS.unique(),
    "unique_consecutive": lambda: INTS.unique_consecutive(),
    "bincount": lambda: torch.bincount(INTS),
    "equal": lambda: torch.equal(X, X.clone()),
    "repeat_interleave": lambda: torch.repeat_interleave(INTS),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_waits_are_counted(wait):
    with ledger.record() as book:
        wait()
    assert book.host_syncs.total() == 1, book.host_syncs


FREE = {
    "arithmetic": lambda: X * 2 + 1,
    "views": lambda: X.view(2, 3).T[0],
    "index by integers": lambda: X[INTS],
    "three-argument where": lambda: torch.where(MASK, X, 0.0),
    "sort": lambda: X.argsort(stable=True),
    "scatter": lambda: torch.zeros(3).index_add_(0, INTS, torch.ones(4)),
    "repeat with a known size": lambda: torch.repeat_interleave(X[:4], INTS, output_size=5),
    "shape": lambda: X.shape[0] + len(X) + X.numel(),
}


@pytest.mark.parametrize("work", FREE.values(), ids=FREE.keys())
def test_work_without_a_wait(work):
    with ledger.record() as book:
        work()
    assert book.host_syncs.total() == 0, book.host_syncs


def test_views_and_bare_allocations_are_no_launches():
    with ledger.record() as book:
        y = torch.empty(4).view(2, 2)
        y.T.expand(3, 2, 2)
    assert book.launches.total() == 0
    assert (book.allocations, book.allocated_bytes) == (1, 16)


def test_launches_and_allocations():
    with ledger.record() as book:
        X.mul(2).add_(1)
    assert dict(book.launches) == {"mul": 1, "add_": 1}
    assert (book.allocations, book.allocated_bytes) == (1, 24)


def test_triton_launches_and_rows_are_reported():
    ledger.record_launch("kernel")  # nobody records: free
    with ledger.record() as book:
        ledger.record_launch("kernel")
        ledger.record_rows(7)
    assert (book.launches["kernel"], book.rows_computed) == (1, 7)


def test_without_operators_only_reports_are_counted():
    group = groups.single()
    with ledger.record() as every, ledger.record(operators=False) as reported:
        X.neg().tolist()
        ledger.record_rows(lambda: int(X[2]))
        group.all_to_all(torch.empty(6), X)
    assert (reported.rows_computed, len(reported.collectives)) == (2, 1)
    assert reported.launches.total() == reported.host_syncs.total() == reported.allocations == 0
    assert (every.launches["neg"], every.rows_computed, every.host_syncs["tolist"]) == (1, 2, 1)


def test_blocks_nest():
    with ledger.record() as outer:
        X.neg()
        with ledger.record() as inner:
            X.tolist()
            X.neg()
    assert (inner.launches["neg"], outer.launches["neg"]) == (1, 2)
    assert inner.host_syncs.total() == outer.host_syncs.total() == 1


def test_repeated_runs_count_the_same():
    def work():
        with ledger.record() as book:
            X[MASK].sort().values.sum().item()
        return book.summary()

    assert work() == work() == work()


def test_collectives_of_one_rank_are_in_the_book():
    group = groups.single()
    with ledger.record() as book:
        group.all_gather(torch.empty(6), X)
        group.all_to_all(torch.empty(6), X)
        group.barrier()
    summary = book.summary()
    assert summary["collectives"] == ["all_gather", "all_to_all"]
    assert (summary["buffer_bytes"], summary["wire_bytes"]) == (48, 0)
    assert summary["host_syncs"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3),
        lambda: torch.empty_like(X),
        lambda: X.new_empty(3),
        lambda: torch.empty_strided((2, 2), (1, 2)),
        lambda: torch.empty(3, dtype=torch.bfloat16),
    ],
)
def test_fresh_memory_is_poisoned_and_not_counted(make):
    with poisoned(), ledger.record() as book:
        fresh = make()
    assert fresh.isnan().all()
    assert book.launches.total() == 0


def test_poison_of_integers_and_of_nothing():
    with poisoned():
        assert X.new_empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
        assert torch.zeros(2).tolist() == [0.0, 0.0]
        assert torch.empty(0).tolist() == []
