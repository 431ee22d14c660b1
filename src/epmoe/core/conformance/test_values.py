"""Every rank against the oracle: ranks, routings, dtypes, sizes, placements, strides.

Case ids such as 1A name public bug reports of other EP layers, replayed here at small size.
"""

import pytest
import torch

from epmoe.core.cases import Case
from epmoe.core.conformance.shapes import SMALL, USUAL, steps
from epmoe.core.draws import KINDS
from epmoe.core.shape import MoEShape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_routing(stage, check, ranks, kind):
    check(Case(stage=stage, shape=SMALL, tokens=steps(ranks), kind=kind, placement="contiguous"))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(stage, check, dtype, ids_dtype):
    check(
        Case(
            stage=stage,
            shape=USUAL,
            tokens=((9, 4),),
            dtype=dtype,
            ids_dtype=ids_dtype,
            kind="zipf",
        )
    )


SIZES = [
    pytest.param(MoEShape(hidden=5, intermediate=7, experts=4, topk=2), id="H5-I7"),
    pytest.param(MoEShape(hidden=33, intermediate=1, experts=3, topk=1), id="H33-I1-K1"),
    pytest.param(MoEShape(hidden=9, intermediate=3, experts=5, topk=5), id="H9-K_is_E"),
    pytest.param(MoEShape(hidden=130, intermediate=65, experts=7, topk=3), id="H130-I65-K3"),
    pytest.param(MoEShape(hidden=16, intermediate=8, experts=1, topk=1), id="E1"),
    pytest.param(MoEShape(hidden=16, intermediate=16, experts=65, topk=10), id="E65-K10"),
]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_5B_odd_sizes(stage, check, shape, dtype):
    check(Case(stage=stage, shape=shape, tokens=((4, 1, 0),), dtype=dtype))


def test_1A_idle_rank(stage, check):
    """1A: a rank brings nothing and receives much, brings some and receives nothing, and neither; then nobody."""
    on_rank_0, elsewhere, none = [[0, 1]] * 4, [[2, 5]] * 4, []
    check(
        Case(
            stage=stage,
            shape=SMALL,
            tokens=((0, 4, 4, 4), (4, 4, 4, 4), (0, 4, 4, 4), (0, 0, 0, 0)),
            ids=(
                (none, on_rank_0, on_rank_0, on_rank_0),
                (elsewhere,) * 4,
                (none, elsewhere, elsewhere, elsewhere),
                (none,) * 4,
            ),
        )
    )


def test_1B_every_step_communicates_alike(stage, check):
    """1B: idle steps in turn; odd ones go to rank 0's experts alone. Nobody leaves an exchange out."""
    tokens = tuple(zip((4, 0, 3, 0, 0, 1, 0, 2), (0, 0, 2, 5, 0, 0, 7, 0), strict=True))
    ids = tuple(
        tuple([[0, 3] if step % 2 else [1, 6]] * t for t in call)
        for step, call in enumerate(tokens)
    )
    reports = check(Case(stage=stage, shape=SMALL, tokens=tokens, ids=ids))
    lists = {tuple(call.ledger["collectives"]) for one in reports for call in one.calls}
    assert len(lists) == 1, lists


@pytest.mark.large
def test_2A_heavy_skew(stage, check):
    """2A: 2304 tokens on each of 4 ranks, all but ten of them to the same four experts, two draws."""
    shape = MoEShape(hidden=8, intermediate=8, experts=16, topk=4)

    def skewed(call: int, rank: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(100 * call + rank)
        random = [torch.randperm(16, generator=generator)[:4].tolist() for _ in range(10)]
        herd = torch.randperm(16, generator=torch.Generator().manual_seed(call))[:4].tolist()
        return random + [herd] * 2294

    ids = [[skewed(call, rank) for rank in range(4)] for call in range(2)]
    check(Case(stage=stage, shape=shape, tokens=((2304,) * 4,) * 2, ids=ids, rows=48, seed=7))


@pytest.mark.large
def test_2B_everything_to_one_rank(stage, check):
    """2B: 4 x 256 tokens, both experts of each on the last rank, after a call that had none there."""
    first, last = [[0, 1]] * 256, [[6, 7]] * 256
    ids = ((first,) * 4, (last,) * 4)
    check(Case(stage=stage, shape=SMALL, tokens=((256,) * 4,) * 2, ids=ids, rows=32))


def test_2D_duplicate_ids(stage, check):
    """2D: an expert that is named twice counts twice; so do two experts of one far rank."""
    tokens = [[3, 3], [6, 7], [3, 5]]
    check(Case(stage=stage, shape=SMALL, tokens=((3, 0), (0, 3)), ids=((tokens, []), ([], tokens))))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_3A_ids_that_name_nothing(stage, check, ids_dtype):
    """3A: -1, E and E + 5 contribute nothing and are not counted."""
    E = SMALL.experts
    rows = [[0, 1], [4, 5], [2, 7], [-1, -1], [6, 1], [2, -1], [E + 5, 3], [E, 4]]
    case = Case(
        stage=stage, shape=SMALL, tokens=((8, 8),), ids=((rows, rows[::-1]),), ids_dtype=ids_dtype
    )
    check(case)


def test_3A_wide_ids_do_not_wrap(stage, check):
    """3A: 2**32 + 3 in int64 is no expert, and not expert 3."""
    rows = [[2**32 + 3, 1], [-(2**32), 2**62], [2, -(2**62) + 5]]
    check(
        Case(stage=stage, shape=SMALL, tokens=((3, 3),), ids=((rows, rows),), ids_dtype=torch.int64)
    )


def test_3A_nobody_names_anything(stage, check):
    """3A: a whole batch of -1 gives exact zeros."""
    check(Case(stage=stage, shape=SMALL, tokens=((5, 2),), ids=(([[-1, -1]] * 5, [[-1, -1]] * 2),)))


def test_3D_small_call_after_a_full_one(stage, check):
    """3D: rows and ids of a larger, earlier call must not come back."""
    shape = SMALL
    check(Case(stage=stage, shape=shape, tokens=((64, 64), (1, 0), (0, 1), (64, 1)), kind="zipf"))


def test_3E_uneven_blocks(stage, check):
    """3E: 1, 0, 7, 8 and 9 rows per expert, so that padded blocks are longer than their rows; token 0 is the first."""
    shape = MoEShape(hidden=16, intermediate=8, experts=5, topk=1)
    rows = [[e] for e, count in enumerate((1, 0, 7, 8, 9)) for _ in range(count)]
    check(
        Case(
            stage=stage,
            shape=shape,
            tokens=((25, 0), (13, 12)),
            ids=((rows, []), (rows[:13], rows[13:])),
        )
    )


@pytest.mark.parametrize(("experts", "ranks"), [(5, 2), (8, 3), (3, 4), (7, 4), (1, 3)])
def test_5C_experts_do_not_divide(stage, check, experts, ranks):
    """5C: the first ranks own one expert more; a rank without any still takes part."""
    shape = MoEShape(hidden=16, intermediate=8, experts=experts, topk=min(2, experts))
    check(Case(stage=stage, shape=shape, tokens=((3, 2, 4, 1)[:ranks], (0, 5, 0, 2)[:ranks])))


@pytest.mark.large
@pytest.mark.parametrize("topk", [2, 8], ids=lambda k: f"K{k}")
def test_5E_every_token_count(stage, check, topk):
    """5E: every small T, and those around the usual tile sizes."""
    counts = [*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 128, 129]
    tokens = tuple((t, 130 - t) for t in counts)
    shape = MoEShape(hidden=8, intermediate=8, experts=8, topk=topk)
    check(Case(stage=stage, shape=shape, tokens=tokens, rows=9))


@pytest.mark.parametrize(
    "placement",
    ["round_robin", (1, 0, 0, 1, 1, 0, 1, 0), (0, 0, 1, 1, 1, 1, 1, 1), (1,) * 8],
    ids=["round_robin", "mixed", "uneven", "all_on_rank_1"],
)
def test_12B_placement(stage, check, placement):
    """12B: weights are found where the map says. Expert e answers e + 1 times as loud, so a mix-up shows."""
    check(Case(stage=stage, shape=SMALL, tokens=((6, 3), (0, 8)), placement=placement))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("topk", [1, 2])
def test_11B_strides(stage, check, topk, dtype):
    """11B: every second column, a transpose, parts of packed weights; the gaps are full of NaN."""
    shape = SMALL.with_(topk=topk)
    check(Case(stage=stage, shape=shape, tokens=((5, 1), (2, 4)), strided=True, dtype=dtype))


@pytest.mark.large
@pytest.mark.parametrize("declared", [False, True], ids=["asked", "declared"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_9D_rounds(stage, check, ranks, declared):
    """9D: more tokens than the layer holds at once run as rounds, the last one shorter; one token a round too."""
    tokens = tuple(call[:ranks] for call in ((11, 3, 0), (4, 0, 9), (0, 0, 0), (1, 4, 4)))
    for capacity in (1, 4, 16):
        check(
            Case(
                stage=stage,
                shape=SMALL,
                tokens=tokens,
                capacity=capacity,
                overflow="rounds",
                declared=declared,
            )
        )


def test_9D_two_rounds(stage, check):
    """9D: the smallest case of rounds, which interpreted kernels can afford."""
    check(Case(stage=stage, shape=SMALL, tokens=((5, 1),), capacity=4, overflow="rounds"))


def test_declared_tokens_below_capacity(stage, check):
    """A caller that declares the fullest rank gets the same values from smaller buffers."""
    check(Case(stage=stage, shape=SMALL, tokens=((3, 0, 2), (0, 0, 0)), capacity=64, declared=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_on_cuda(stage, gpu_check, kind, dtype):
    for ranks in (1, 2, 4):
        gpu_check(Case(stage=stage, shape=USUAL, tokens=steps(ranks), kind=kind, dtype=dtype))


@pytest.mark.parametrize("kind", ["uniform", "one_rank"])
def test_eight_ranks(stage, check, kind):
    """More ranks than a usual session has: `--ranks 8` runs it."""
    shape = MoEShape(hidden=16, intermediate=8, experts=20, topk=4)
    tokens = ((3, 0, 1, 2, 0, 4, 1, 5), (0, 0, 0, 0, 0, 0, 0, 1))
    check(Case(stage=stage, shape=shape, tokens=tokens, kind=kind))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 4])
def test_long_prompts_on_cuda(stage, gpu_check, ranks):
    """8,192 tokens on the fullest rank, between two short calls; rows are sampled from all of it."""
    shape = MoEShape(hidden=512, intermediate=256, experts=32, topk=8)
    tokens = ((3, 0, 17, 1)[:ranks], (8192, 8000, 0, 4097)[:ranks], (1, 9, 0, 5)[:ranks])
    for kind in ("uniform", "zipf"):
        gpu_check(
            Case(stage=stage, shape=shape, tokens=tokens, kind=kind, dtype=torch.bfloat16, rows=48)
        )
