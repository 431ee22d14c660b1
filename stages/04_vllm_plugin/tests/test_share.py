"""Which tokens a rank brings, and the stage's host itself on several ranks; no vLLM needed."""

import pytest
import torch

from epmoe.core.errors import UnsupportedError
from epmoe.core.launch import RankPool
from epmoe.core.placement import contiguous, round_robin
from epmoe.core.routing import route
from epmoe.core.shape import MoEShape
from epmoe.core.weights import random_weights
from epmoe.vllm_plugin.host import HostSpec, Shared, StagedExperts, placement_from_maps
from epmoe.vllm_plugin.settings import Settings
from epmoe.vllm_plugin.share import Share, capacity_for, most_tokens

SHAPE = MoEShape(hidden=8, intermediate=4, experts=5, topk=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 8])
def test_every_token_is_somebodys_once_and_in_order(ranks, tokens):
    shares = [Share(rank, ranks) for rank in range(ranks)]
    x_TH = torch.arange(tokens)[:, None].float()
    blocks = [share.pad(x_TH[share.slice(tokens)], tokens) for share in shares]
    assert {len(block) for block in blocks} == {shares[0].part(tokens)}
    assert torch.equal(torch.cat(blocks)[:tokens], x_TH)


@pytest.mark.parametrize(
    ("tokens", "ranks", "sizes", "most"),
    [(5, 1, None, 5), (5, 1, [5, 9], 9), (5, 2, None, 3), (2, 2, [2, 7], 4), (0, 4, [0, 0], 0)],
)
def test_all_ranks_know_the_fullest(tokens, ranks, sizes, most):
    assert most_tokens(tokens, Share(0, ranks), sizes) == most


@pytest.mark.parametrize(
    ("most", "captured", "ranks", "capacity"),
    [
        (64, 0, 1, 64),
        (64, 512, 1, 64),
        (16384, 512, 1, 2048),
        (16384, 512, 16, 1024),
        (8192, 4096, 1, 4096),
    ],
)
def test_buffers_are_made_for_a_step_but_not_for_any(most, captured, ranks, capacity):
    assert capacity_for(most, captured, Share(0, ranks)) == capacity


def test_maps_become_placements():
    for placement in (contiguous(8, 3), round_robin(8, 3)):
        maps = [
            [placement.slots[e] if placement.owners[e] == rank else -1 for e in range(8)]
            for rank in range(3)
        ]
        found = placement_from_maps(maps, 8)
        assert (found.owners, found.kind) == (placement.owners, placement.kind)


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        ([[0, 1], [-1, 0]], "expert 1 lives on 2 ranks"),
        ([[0, -1], [-1, -1]], "expert 1 lives on 0 ranks"),
        ([[1, 0], [-1, -1]], "expert 0 is in slot 1"),
    ],
)
def test_maps_that_are_none(maps, words):
    with pytest.raises(UnsupportedError, match=words):
        placement_from_maps(maps, 2)


def staged(group, stage: str, share: Share) -> StagedExperts:
    """The host on this rank, with the group's own all-gather where tensor-parallel ranks divide."""

    def gather(y_tH):
        out = y_tH.new_empty(group.size * len(y_tH), y_tH.shape[1])
        group.all_gather(out, y_tH.contiguous())
        return out

    placement = contiguous(SHAPE.experts, group.size)
    spec = HostSpec(
        name="layer", shape=SHAPE, placement=placement, capacity=4, share=share, gather=gather
    )
    host = StagedExperts(Settings(stage=stage, count=True), spec, Shared(group))
    weights = random_weights(SHAPE, placement.experts_of(group.rank))
    host.place(weights.w13_E2IH, weights.w2_EHI)
    return host


def tokens_of(rank: int, tokens: int):
    generator = torch.Generator().manual_seed(rank)
    x_TH = torch.randn(tokens, SHAPE.hidden, generator=generator)
    logits_TE = torch.randn(tokens, SHAPE.experts, generator=generator)
    return x_TH, *route(logits_TE, SHAPE.router, SHAPE.topk)


def alone(x_TH, ids_TK, weights_TK):
    """One rank that owns everything."""
    from epmoe.core.groups import single

    host = staged(single(), "00_reference", Share())
    return host(x_TH, ids_TK, weights_TK)


def data_parallel(group, stage: str, steps):
    """Unequal, idle and overfull steps; calls are counted alike on all ranks."""
    host, worst = staged(group, stage, Share()), 0.0
    for sizes in steps:
        batch = tokens_of(group.rank, sizes[group.rank])
        worst = max(worst, float((host(*batch, sizes) - alone(*batch)).abs().sum()))
    return worst, host.describe()


def tensor_parallel(group, stage: str, steps):
    """All ranks hold the same tokens, each runs its part, all get everything."""
    host, worst = staged(group, stage, Share(group.rank, group.size)), 0.0
    for tokens in steps:
        batch = tokens_of(7, tokens)
        found = host(*batch)
        assert found.shape == batch[0].shape
        worst = max(worst, float((found - alone(*batch)).abs().sum()))
    return worst, host.describe()


@pytest.fixture(scope="module")
def pool():
    with RankPool(3, "cpu") as ranks:
        yield ranks


STAGES = ["01_variable_a2a", "02_fixed_capacity"]


@pytest.mark.parametrize("which", STAGES)
def test_unequal_and_idle_ranks_and_more_than_the_capacity(pool, which):
    steps = [(3, 1, 0), (0, 0, 0), (0, 4, 1), (9, 0, 2)]
    for off, told in pool.run(data_parallel, which, steps):
        assert off < 1e-4
        assert (told["calls"], told["runs"]) == (len(steps), len(steps))


@pytest.mark.parametrize("which", STAGES)
def test_tokens_divided_between_tensor_parallel_ranks(pool, which):
    for off, _ in pool.run(tensor_parallel, which, [1, 2, 3, 7]):
        assert off < 1e-4
