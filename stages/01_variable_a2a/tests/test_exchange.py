"""The exchange without experts: every assignment arrives once, at its owner, with its own weight, and finds home."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from epmoe.core.cases import Case
from epmoe.core.errors import DisagreementError
from epmoe.core.groups import EPGroup
from epmoe.core.shape import MoEShape
from epmoe.core.split import SplitLayer
from epmoe.core.verify import build_case

STAGE = Path(__file__).parents[1].name
SHAPE = MoEShape(hidden=2, intermediate=4, experts=8, topk=3)


def carry(group: EPGroup, case: Case) -> tuple[list, list, Tensor]:
    """Send (rank, token) as x and the expert id as routing weight; what arrived, what was sent, what came home."""
    layer = build_case(group, case)
    assert isinstance(layer, SplitLayer)
    ids_TK, _ = case.routing(0, group.rank)
    T = len(ids_TK)
    x_TH = torch.stack([torch.full((T,), float(group.rank)), torch.arange(float(T))], dim=1)
    rows, way = layer.exchange.dispatch(x_TH, ids_TK, ids_TK.float(), case.max_tokens_per_rank)
    slots = rows.slots_RJ[:, 0].tolist()
    arrived = [
        (int(source), int(token), int(expert), slot)
        for (source, token), expert, slot in zip(
            rows.x_RH.tolist(), rows.weights_RJ[:, 0].tolist(), slots, strict=True
        )
    ]
    sent = [(group.rank, t, e) for t in range(T) for e in ids_TK[t].tolist() if e >= 0]
    home_TH = layer.exchange.combine(rows.x_RH.float(), way)
    layer.close()
    return arrived, sent, home_TH


@pytest.mark.parametrize("kind", ["uniform", "hot_expert", "masked", "duplicates"])
@pytest.mark.parametrize("placement", ["contiguous", "round_robin"])
def test_2A_every_assignment_arrives_once(stage, run, kind, placement):
    """2A: the payload says where a row comes from; no row is lost, doubled or swapped."""
    tokens = ((40, 0, 7, 25),)
    case = Case(stage=stage, shape=SHAPE, tokens=tokens, kind=kind, placement=placement)
    results = run(carry, case)
    placed = case.placed()
    for rank, (arrived, _, _) in enumerate(results):
        for _, _, expert, slot in arrived:
            assert (placed.owners[expert], placed.slots[expert]) == (rank, slot)
    received = sorted(row[:3] for arrived, _, _ in results for row in arrived)
    assert received == sorted(row for _, sent, _ in results for row in sent)


def test_rows_come_home_to_their_tokens(stage, run):
    """Rows that are returned as they came add up to (number of real ids) times the token."""
    case = Case(stage=stage, shape=SHAPE, tokens=((40, 0, 7, 25),), kind="masked")
    for rank, (_, _, home_TH) in enumerate(run(carry, case)):
        real_T = (case.routing(0, rank)[0] >= 0).sum(dim=1)
        T = len(real_T)
        assert home_TH[:, 0].tolist() == (real_T * rank).tolist()
        assert home_TH[:, 1].tolist() == (real_T * torch.arange(T)).tolist()


def unmatched(group: EPGroup, case: Case) -> None:
    """Rank 0 expects 3 rows from rank 1, which sends 1."""
    group.check_exchanges = True
    send, recv = ([0, 1], [0, 3]) if group.rank == 0 else ([1, 0], [1, 0])
    out = torch.empty(sum(recv), 2)
    group.all_to_all(out, torch.zeros(sum(send), 2), recv, send)


def with_zeros(group: EPGroup, case: Case) -> list[float]:
    """Rank 0 sends one row to each, rank 1 sends none."""
    group.check_exchanges = True
    send, recv = ([1, 1], [1, 0]) if group.rank == 0 else ([0, 0], [1, 0])
    out = torch.full((sum(recv), 1), -1.0)
    group.all_to_all(out, torch.arange(float(sum(send)))[:, None], recv, send)
    return out[:, 0].tolist()


def test_10B_counts_that_do_not_match(stage, run):
    """10B: with checked exchanges all ranks raise the same error; valid lists with zeros go through."""
    case = Case(stage=stage, shape=SHAPE, tokens=((1, 1),))
    with pytest.raises(DisagreementError, match="rank"):
        run(unmatched, case)
    assert run(with_zeros, case) == [[0.0], [1.0]]
