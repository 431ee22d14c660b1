"""EPGroup on real ranks over gloo, and alone."""

import pytest
import torch
import torch.distributed as dist

from epmoe.core import groups, ledger
from epmoe.core.errors import DisagreementError, InputError
from epmoe.core.launch import RankPool

RANKS = 3


@pytest.fixture(scope="module")
def pool():
    with RankPool(RANKS, device="cpu") as pool:
        yield pool


def _gather(group, dtype):
    x = torch.full((2, 3), group.rank + 1.0).to(dtype)
    out = torch.zeros(2 * group.size, 3).to(dtype)
    group.all_gather(out, x)
    return out.float()


NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
BYTES_ONLY = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", [*NUMBERS, *BYTES_ONLY], ids=str)
def test_all_gather_in_rank_order_for_every_dtype(pool, dtype):
    want = torch.tensor([1.0, 1, 2, 2, 3, 3])[:, None].expand(6, 3)
    for got in pool.run(_gather, dtype):
        assert torch.equal(got, want)


def _scatter(group):
    x = torch.arange(group.size * 2 * 3.0).view(-1, 3) + 100 * group.rank
    kept, out = x.clone(), torch.full((2, 3), torch.nan)
    group.reduce_scatter(out, x)
    return out, torch.equal(x, kept)


def test_reduce_scatter_sums_this_ranks_block_and_leaves_the_input(pool):
    base = torch.arange(RANKS * 6.0).view(-1, 3)
    for rank, (out, unchanged) in enumerate(pool.run(_scatter)):
        assert torch.equal(out, RANKS * base[2 * rank : 2 * rank + 2] + 300)
        assert unchanged


def _exchange(group, matrix, dtype=torch.float32):
    """Row i from s to d holds 100*s + 10*d + i; counts are matrix[source][target]."""
    send = matrix[group.rank]
    recv = [row[group.rank] for row in matrix]
    rows = [100 * group.rank + 10 * d + i for d, n in enumerate(send) for i in range(n)]
    x = torch.tensor(rows, dtype=torch.float32)[:, None].expand(-1, 2).contiguous().to(dtype)
    out = torch.full((sum(recv), 2), 255.0).to(dtype)
    group.all_to_all(out, x, recv, send)
    return out[:, 0].float().tolist()


@pytest.mark.parametrize(
    "matrix",
    [
        [[1, 2, 3], [0, 1, 4], [2, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [5, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    ],
    ids=["uneven", "one-to-one", "nothing", "equal"],
)
def test_all_to_all_with_counts(pool, matrix):
    got = pool.run(_exchange, matrix)
    for target in range(RANKS):
        want = [100 * s + 10 * target + i for s in range(RANKS) for i in range(matrix[s][target])]
        assert got[target] == want


def test_a_rank_that_sends_nothing_back_still_completes(pool):
    assert pool.run(_exchange, [[1, 1], [0, 0]], ranks=2) == [[0.0], [10.0]]


def test_float8_rows_travel_as_bytes(pool):
    assert pool.run(_exchange, [[0, 1], [1, 0]], torch.float8_e4m3fn, ranks=2)[1] == [10.0]


def _equal_blocks(group, rows):
    x = torch.arange(group.size * rows)[:, None] + 100 * group.rank
    out = torch.full_like(x, -1)
    group.all_to_all(out, x)
    return out[:, 0].tolist()


def test_all_to_all_in_equal_blocks(pool):
    got = pool.run(_equal_blocks, 2)
    assert got[1] == [2, 3, 102, 103, 202, 203]
    assert pool.run(_equal_blocks, 0) == [[], [], []]


def _zero_sized(group):
    empty = torch.empty(0, 4)
    group.all_gather(empty.clone(), empty)
    group.reduce_scatter(empty.clone(), empty)
    group.all_gather(torch.empty(group.size, 0), torch.empty(1, 0))
    return group.operations


def test_zero_sized_exchanges_are_made_all_the_same(pool):
    before = pool.run(lambda group: group.operations)
    assert [b - a for a, b in zip(before, pool.run(_zero_sized), strict=True)] == [3, 3, 3]


def _booked(group):
    x = torch.zeros(group.size * 2, 5)
    with ledger.record() as book:
        group.all_gather(torch.zeros(group.size * len(x), 5), x)
        group.reduce_scatter(torch.zeros(2, 5), x)
        group.all_to_all(torch.zeros_like(x), x)
        send = [0] * group.size
        send[group.rank], send[0] = 1, send[0] + 2 if group.rank else 3
        recv = [row[group.rank] for row in group.all_gather_ints(send)]
        group.all_to_all(torch.zeros(sum(recv), 5), torch.zeros(3, 5), recv, send)
        group.barrier()
        group.all_gather_objects({"rank": group.rank})
    return [(c.name, c.buffer_bytes, c.wire_bytes) for c in book.collectives], book.host_syncs


def test_ledger_holds_bytes_for_other_ranks_and_no_control_plane(pool):
    row = 5 * 4
    for rank, (books, syncs) in enumerate(pool.run(_booked)):
        assert books == [
            ("all_gather", 6 * row, 2 * 6 * row),
            ("reduce_scatter", 6 * row, 4 * row),
            ("all_to_all", 6 * row, 4 * row),
            ("all_to_all", 3 * row, (2 if rank else 0) * row),
        ]
        assert syncs.total() == 0


def test_one_rank_copies_is_in_the_ledger_and_needs_no_torch_distributed():
    group = groups.single()
    x = torch.arange(6.0).view(3, 2)
    with ledger.record() as book:
        for exchange in (group.all_gather, group.reduce_scatter, group.all_to_all):
            out = torch.full_like(x, torch.nan)
            exchange(out, x)
            assert torch.equal(out, x)
        group.all_to_all(out, x, [3], [3])
    assert [c.wire_bytes for c in book.collectives] == [0, 0, 0, 0]
    assert [c.buffer_bytes for c in book.collectives] == [24, 24, 24, 24]
    assert "copy_" not in book.launches  # it stands for a transfer
    assert group.all_gather_ints([4, 5]) == [[4, 5]]
    assert group.all_gather_objects("a") == ["a"]
    assert (group.rank, group.size, group.transport) == (0, 1, "single")
    assert group.subgroup(1) is group
    assert not dist.is_initialized()


def _objects(group):
    group.barrier()
    return group.all_gather_objects("x" * 10**group.rank), group.all_gather_ints([group.rank, -1])


def test_control_plane_gathers_objects_of_different_sizes(pool):
    want = (["x", "x" * 10, "x" * 100], [[0, -1], [1, -1], [2, -1]])
    assert pool.run(_objects) == [want] * RANKS


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g, x: g.all_gather(x[:2], x), "long side"),
        (lambda g, x: g.all_gather(x.double(), x), "dtype and row shape"),
        (lambda g, x: g.all_gather(torch.zeros(4, 3), x), "dtype and row shape"),
        (lambda g, x: g.all_gather(x, x.t().contiguous().t()), "contiguous"),
        (lambda g, x: g.all_gather(x[0, 0], x[0, 0]), "contiguous tensors of rows"),
        (lambda g, x: g.reduce_scatter(x.to(torch.float8_e5m2), x.to(torch.float8_e5m2)), "float8"),
        (lambda g, x: g.all_to_all(x, x, [4], None), "both"),
        (lambda g, x: g.all_to_all(x, x, [4], [3]), "sum to its 4 rows"),
        (lambda g, x: g.all_to_all(x, x, [4], [5, -1]), "1 counts"),
        (lambda g, x: g.all_to_all(x[:3], x), "without counts"),
        (lambda g, x: g.all_gather(x.to("meta"), x), "meta"),
    ],
)
def test_misfits_are_refused_before_communication(call, words):
    group, x = groups.single(), torch.zeros(4, 2)
    with pytest.raises(InputError, match=words):
        call(group, x)
    assert group.operations == 0


def _checked(group, shapes, counts):
    group.check_exchanges = True
    x = torch.zeros(*shapes[group.rank])
    send, recv = counts[group.rank] if counts else (None, None)
    out = torch.zeros(sum(recv) if recv else len(x), *x.shape[1:])
    try:
        group.all_to_all(out, x, recv, send)
    except InputError as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize(
    ("shapes", "counts", "kind", "words"),
    [
        ([(2, 3), (2, 4)], None, DisagreementError, "rank 1 calls"),
        ([(2, 3), (4, 3)], None, DisagreementError, "rank 1 calls"),
        ([(2, 3), (3, 3)], None, InputError, "rank 1: all_to_all without counts"),
        (
            [(1, 3), (3, 3)],
            [([1, 0], [1, 1]), ([3, 0], [0, 0])],
            DisagreementError,
            "rank 1 sends 3 rows to rank 0, which expects 1",
        ),
        ([(2, 3), (0, 3)], [([1, 1], [1, 0]), ([0, 0], [1, 0])], None, ""),
    ],
    ids=["row-shape", "rows", "one-rank-wrong", "counts-not-transposed", "valid-with-zeros"],
)
def test_checked_exchange_fails_alike_on_all_ranks(pool, shapes, counts, kind, words):
    seen = pool.run(_checked, shapes, counts, ranks=2, timeout=20)
    assert seen[0] == seen[1]
    if kind is None:
        assert seen[0] is None
    else:
        assert seen[0][0] is kind
        assert words in seen[0][1]
