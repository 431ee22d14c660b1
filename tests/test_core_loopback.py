"""One process plays one of several ranks: what comes back is that rank's share, source by source."""

import pytest
import torch
from torch import Tensor

from epmoe.core import groups, ledger, registry
from epmoe.core.cases import Case
from epmoe.core.errors import InputError
from epmoe.core.layer import build
from epmoe.core.loopback import LoopbackGroup, local_share
from epmoe.core.placement import contiguous
from epmoe.core.shape import MoEShape
from epmoe.core.verify import tolerance
from epmoe.reference.oracle import Answer, oracle

SHAPE = MoEShape(hidden=16, intermediate=24, experts=8, topk=2)
TOKENS = (4, 0, 3)
Call = tuple[Tensor, Tensor, Tensor]


def case_of(**changes) -> Case:
    usual = {"stage": "02", "shape": SHAPE, "tokens": (TOKENS,), "capacity": 6}
    return Case(**{**usual, **changes})


def calls_of(case: Case, call: int = 0) -> list[Call]:
    return [(case.tokens_of(call, s), *case.routing(call, s)) for s in range(case.ranks)]


def played(case: Case, rank: int):
    """The layer of `rank` in a group where nobody else is."""
    group = LoopbackGroup(rank, case.ranks, "cpu")
    placement = case.placed()
    weights = case.weights_of(placement.experts_of(rank))
    layer = build(
        case.stage, case.shape, weights.to(case.dtype), placement, group, case.max_tokens_per_rank
    )
    return group, layer


def share(case: Case, rank: int, source: int, call: Call) -> Answer:
    """What `rank` owes the tokens of one source."""
    x_TH, ids_TK, weights_TK = call
    mine_TK = local_share(ids_TK, case.placed().owner_table(source=source), rank)
    everything = case.weights_of(range(case.shape.experts)).to(torch.float64)
    return oracle(x_TH.double(), mine_TK, weights_TK, everything, torch.float64)


def owed(case: Case, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The sum over sources of what `rank` owes their first `tokens` tokens, and the size of its terms."""
    y_TH = torch.zeros(tokens, case.shape.hidden, dtype=torch.float64)
    terms_T = torch.zeros(tokens, dtype=torch.float64)
    for source, call in enumerate(calls_of(case)):
        answer = share(case, rank, source, call)
        count = min(tokens, len(answer.y_TH))
        y_TH[:count] += answer.y_TH[:count]
        terms_T[:count] += answer.terms_T[:count]
    return y_TH, terms_T


@pytest.mark.parametrize("kind", ["uniform", "one_rank", "masked"])
@pytest.mark.parametrize(
    "placement",
    ["contiguous", (2, 0, 1, 1, 2, 0, 2, 1), ((0, 1, 2), 0, (0, 2), 1, 1, (1, 2), 2, 0)],
    ids=["contiguous", "explicit", "replicated"],
)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_result_is_what_this_rank_owes_every_source(rank, kind, placement):
    pays_what_it_owes(case_of(kind=kind, placement=placement), rank)


def pays_what_it_owes(case: Case, rank: int) -> None:
    """All sources in turn bring their tokens to the played rank."""
    group, layer = played(case, rank)
    calls = calls_of(case)
    group.record_peers(layer, calls)
    for source, call in enumerate(calls):  # whoever's tokens are brought: what arrives was recorded
        y_TH = layer(*call, max_tokens=max(TOKENS))
        wanted_TH, terms_T = owed(case, rank, TOKENS[source])
        off_T = (y_TH.double() - wanted_TH).abs().amax(1)
        assert (off_T <= tolerance(torch.float32) * terms_T).all()
    layer.close()


def offers_loopback(name: str) -> bool:
    return "loopback" in registry.load(name).capabilities.transports


@pytest.mark.parametrize(
    "name", [name for name in (*registry.names(), *registry.pairs()) if offers_loopback(name)]
)
def test_whoever_offers_it_can_be_played(name):
    """Packed rows do not care who computes them."""
    pays_what_it_owes(case_of(stage=name, kind="masked"), rank=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_shares_together_are_the_layer(dtype):
    """The parts of all three played ranks add up to the sum over sources of the whole layer's results."""
    case = case_of(dtype=dtype)
    everything = case.weights_of(range(SHAPE.experts)).to(dtype)
    whole = build("02", SHAPE, everything, contiguous(8, 1), groups.single(), 8)
    wanted_TH, parts_TH = torch.zeros(2, 4, SHAPE.hidden, dtype=torch.float64)
    for call in calls_of(case):
        wanted_TH[: len(call[0])] += whole(*call)
    for rank in range(3):
        group, layer = played(case, rank)
        group.record_peers(layer, calls_of(case))
        parts_TH += layer(*calls_of(case)[0], max_tokens=max(TOKENS))
    off = (parts_TH - wanted_TH).abs().max() / wanted_TH.abs().max()
    assert off <= 3 * tolerance(dtype)


def test_recording_again_replaces_what_was_kept():
    """A second draw with fewer tokens leaves none of the first."""
    case = case_of(tokens=((4, 4, 4), (4, 0, 0)), kind="one_rank")
    group, layer = played(case, 2)
    group.record_peers(layer, calls_of(case, 0))
    before_TH = layer(*calls_of(case, 1)[0], max_tokens=4)
    group.record_peers(layer, calls_of(case, 1))
    after_TH = layer(*calls_of(case, 1)[0], max_tokens=4)
    fresh_group, fresh = played(case, 2)
    fresh_group.record_peers(fresh, calls_of(case, 1))
    assert torch.equal(after_TH, fresh(*calls_of(case, 1)[0], max_tokens=4))
    assert not torch.equal(before_TH, after_TH)


def test_wire_bytes_are_those_of_the_whole_group():
    case = case_of()
    group, layer = played(case, 0)
    group.record_peers(layer, calls_of(case))
    with ledger.record() as book:
        layer(*calls_of(case)[0], max_tokens=4)
    assert [c.name for c in book.collectives] == ["all_to_all"] * 2
    row_bytes = 96  # 64 + 16 + 4, padded
    assert book.collectives[0].wire_bytes == 2 * 4 * row_bytes
    assert book.collectives[1].wire_bytes == 2 * 4 * 16 * 4


def test_each_layer_receives_what_was_recorded_through_it():
    """Two layers of one chain, other tokens through each: neither call gets the peers of the other."""
    case = case_of(tokens=(TOKENS, (4, 2, 1)))
    group, first = played(case, 0)
    weights = case.weights_of(case.placed().experts_of(0))
    second, third = (build("02", SHAPE, weights, case.placed(), group, 6) for _ in range(2))
    own, (before, after) = calls_of(case)[0], (calls_of(case, 0), calls_of(case, 1))
    group.record_peers(first, before)
    wanted_TH = first(*own, max_tokens=4)
    group.record_peers(second, after)
    other_TH = second(*own, max_tokens=4)
    assert not torch.equal(wanted_TH, other_TH)
    assert torch.equal(first(*own, max_tokens=4), wanted_TH)
    assert torch.equal(third(*own, max_tokens=4), other_TH)  # through it nothing was: the latest


def test_a_recording_is_for_rows_that_are_packed_alike():
    """Peers that know another map, mask or rule for lost experts would send other rows."""
    case = case_of()
    group, layer = played(case, 0)
    group.record_peers(layer, calls_of(case))
    own, words = calls_of(case)[0], "nothing was recorded for 4 tokens .* map and mask"
    for more, placement in (
        ({}, case_of(placement="round_robin").placed()),
        ({"lost": "renormalise"}, case.placed()),
    ):
        weights = case.weights_of(placement.experts_of(0))
        other = build("02", SHAPE, weights, placement, group, 6, **more)
        with pytest.raises(InputError, match=words):
            other(*own, max_tokens=4)
    layer.mask_ranks([1])
    with pytest.raises(InputError, match=words):
        layer(*own, max_tokens=4)
    layer.mask_ranks(())
    layer(*own, max_tokens=4)


def test_a_recording_that_failed_is_none():
    """Rows of a new recording's first source among those of the old one would be nobody's peers."""
    case = case_of()
    group, layer = played(case, 0)
    group.record_peers(layer, calls_of(case))
    with pytest.raises(InputError, match=r"x is torch\.float64"):
        group.record_peers(
            layer, [(c[0].double() if len(c[0]) == 3 else c[0], *c[1:]) for c in calls_of(case)]
        )
    with pytest.raises(InputError, match="nothing was recorded"):
        layer(*calls_of(case)[0], max_tokens=4)


def test_recording_again_writes_in_place():
    """A captured call reads the buffer of its recording."""
    case = case_of(tokens=(TOKENS, (4, 2, 1)))
    group, layer = played(case, 0)
    group.record_peers(layer, calls_of(case))
    inbox = group._recorded[layer].inbox
    kept = inbox.clone()
    group.record_peers(layer, calls_of(case, 1))
    assert group._recorded[layer].inbox is inbox
    assert not torch.equal(inbox, kept)


# ---- refusals


def test_a_call_before_recording_is_refused():
    case = case_of()
    _, layer = played(case, 0)
    with pytest.raises(
        InputError, match=r"nothing was recorded for 4 tokens .* record_peers first"
    ):
        layer(*calls_of(case)[0], max_tokens=4)


def test_another_number_of_tokens_must_be_recorded_too():
    case = case_of()
    group, layer = played(case, 0)
    group.record_peers(layer, calls_of(case))
    with pytest.raises(InputError, match="nothing was recorded for 6 tokens"):
        layer(*calls_of(case)[0], max_tokens=6)


def test_rows_of_another_layer_are_refused():
    """Recorded through a layer of other sizes: the bytes would be read as something else."""
    case, wide = case_of(), case_of(shape=SHAPE.with_(topk=6))
    group, layer = played(case, 0)
    group.record_peers(layer, calls_of(case))
    weights = wide.weights_of(wide.placed().experts_of(0))
    other = build("02", wide.shape, weights, wide.placed(), group, 6)
    with pytest.raises(InputError, match="nothing was recorded for 4 tokens per rank in rows of"):
        other(*calls_of(wide)[0], max_tokens=4)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_one_call_per_rank_is_recorded(count):
    group, layer = played(case_of(), 0)
    with pytest.raises(InputError, match=f"{count} calls for 3 ranks: give one per rank"):
        group.record_peers(layer, (calls_of(case_of()) * 2)[:count])


def test_peers_that_need_rounds_are_refused():
    """A second round would replace the first one's rows: silently wrong."""
    case = case_of(tokens=((4, 13, 3),))
    group, layer = played(case, 0)
    with pytest.raises(InputError, match=r"a peer brings 13 tokens.*max_tokens_per_rank=6"):
        group.record_peers(layer, calls_of(case))


@pytest.mark.parametrize("rank", [-1, 3])
def test_ranks_outside_the_group_are_refused(rank):
    with pytest.raises(InputError, match=f"rank={rank}: must be between 0 and 2"):
        LoopbackGroup(rank, 3, "cpu")


def test_exchanges_without_fixed_shapes_are_refused():
    group, x = LoopbackGroup(0, 2, "cpu"), torch.zeros(4, 2)
    with pytest.raises(InputError, match="no peers to count rows with"):
        group.all_to_all(x, x, [2, 2], [2, 2])
    for call in (group.all_gather, group.reduce_scatter):
        with pytest.raises(InputError, match="choose a stage of fixed shapes"):
            call(x, x)


def test_local_share_by_hand():
    owner_E = torch.tensor([0, 0, 1, 1])
    ids_TK = torch.tensor([[0, 2], [3, 1], [-1, 4], [9, 3]])
    assert local_share(ids_TK, owner_E, 1).tolist() == [[-1, 2], [3, -1], [-1, -1], [-1, 3]]
