"""The exchange without experts: where every row lies, what padding and bad ids do (nothing), and how sums come home."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from epmoe.core.cases import Case
from epmoe.core.groups import EPGroup
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.loopback import LoopbackGroup
from epmoe.core.shape import MoEShape
from epmoe.core.split import SplitLayer
from epmoe.core.verify import bring, build_case, differ
from epmoe.core.workspace import Workspace
from epmoe.fixed_capacity.exchange import FixedCapacity

STAGE = Path(__file__).parents[1].name
SHAPE = MoEShape(hidden=5, intermediate=4, experts=8, topk=3)
PLACEMENTS = ["contiguous", "round_robin", (2, 0, 0, 1, 2, 0, 2, 0)]
STALE = 0xA5


def exchange_of(case: Case, capacity: int) -> FixedCapacity:
    """The exchange of rank 1, without its peers: packing and unpacking need none."""
    weights = case.weights_of(case.placed().experts_of(1))
    spec = LayerSpec(
        stage=STAGE,
        shape=case.shape,
        weights=weights.to(case.dtype),
        placement=case.placed(),
        group=LoopbackGroup(1, case.ranks, "cpu"),
        max_tokens_per_rank=capacity,
    )
    return FixedCapacity(spec, Workspace())


def random_bits(tokens: int, hidden: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    raw = torch.randint(0, 256, (tokens * hidden * dtype.itemsize,), generator=generator)
    return raw.to(torch.uint8).view(dtype).reshape(tokens, hidden)


# ---- packing


def slots_by_hand(case: Case, ids: list[int], rank: int) -> list[int]:
    placed = case.placed()
    real = [e if 0 <= e < case.shape.experts else None for e in ids]
    return [-1 if e is None or placed.owners[e] != rank else placed.slots[e] for e in real]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=["contiguous", "round_robin", "explicit"])
def test_token_t_for_rank_d_is_row_t_of_block_d(placement, dtype):
    """Every block holds every token, bit for bit; a slot is -1 where another rank, or nobody, owns the expert."""
    case = Case(stage=STAGE, shape=SHAPE, tokens=((0, 6, 0),), placement=placement, dtype=dtype)
    x_TH, E = random_bits(6, SHAPE.hidden, dtype), SHAPE.experts
    rows = [[0, 3, 7], [-1, 2, 2], [E, 1, E + 5], [-7, -1, 2**31 - 1], [4, 5, 6], [7, -1, 0]]
    ids_TK = torch.tensor(rows, dtype=torch.int32)
    weights_TK = torch.rand(6, SHAPE.topk)
    exchange = exchange_of(case, capacity=8)
    layout = exchange.layout
    send_DCB = torch.full((3, 8, layout.row_bytes), STALE, dtype=torch.uint8)
    exchange._pack(send_DCB, x_TH, ids_TK, weights_TK)
    for d, block_CB in enumerate(send_DCB):
        assert not differ(layout.x(block_CB)[:6], x_TH)
        assert layout.slots(block_CB)[:6].tolist() == [slots_by_hand(case, r, d) for r in rows]
        assert torch.equal(layout.weights(block_CB)[:6], weights_TK)
        assert layout.valid(block_CB).tolist() == [1] * 6 + [0, 0]
        fields = block_CB[6:].clone()
        layout.valid(fields).fill_(-0x5A5A5A5B)  # 0xA5A5A5A5: all else is as it was
        assert (fields == STALE).all()


@pytest.mark.parametrize("junk", [0x00, 0x01, 0xA5, 0xFF])
def test_padding_rows_are_inert_whatever_they_hold(junk):
    """Slots of rows that do not carry the flag 1 are -1, whatever the bytes say; real ones are as sent."""
    case = Case(stage=STAGE, shape=SHAPE, tokens=((0, 2, 0),))
    exchange = exchange_of(case, capacity=4)
    send_DCB = torch.full((3, 4, exchange.layout.row_bytes), junk, dtype=torch.uint8)
    ids_TK = torch.tensor([[0, 3, 7], [4, 2, 5]], dtype=torch.int32)
    exchange._pack(send_DCB, torch.ones(2, 5), ids_TK, torch.ones(2, 3))
    rows = exchange._unpack(send_DCB.flatten(0, 1))
    slots_DCK = rows.slots_RJ.view(3, 4, 3)
    assert (slots_DCK[:, 2:] == -1).all()
    assert slots_DCK[1, :2].tolist() == [slots_by_hand(case, ids, 1) for ids in ids_TK.tolist()]


def test_only_the_flag_1_makes_a_row_a_token():
    """Any other word, such as what poison or an earlier use of the bytes left, is padding."""
    exchange = exchange_of(Case(stage=STAGE, shape=SHAPE, tokens=((0, 2, 0),)), capacity=4)
    recv_RB = torch.zeros(5, exchange.layout.row_bytes, dtype=torch.uint8)
    exchange.layout.valid(recv_RB)[:] = torch.tensor([1, 0, -1, 2, 2**31 - 1], dtype=torch.int32)
    assert exchange._unpack(recv_RB).slots_RJ.tolist() == [[0] * 3] + [[-1] * 3] * 4


# ---- over real ranks


def built(group: EPGroup, case: Case) -> SplitLayer:
    layer = build_case(group, case)
    assert isinstance(layer, SplitLayer)
    return layer


def arrived(group: EPGroup, case: Case) -> dict[str, Tensor]:
    """x of random bits, sent; what lies in the received rows."""
    layer = built(group, case)
    exchange = layer.exchange
    ids_TK, weights_TK = case.routing(0, group.rank)
    x_TH = random_bits(len(ids_TK), case.shape.hidden, case.dtype)
    rows, _ = exchange.dispatch(x_TH, ids_TK, weights_TK, case.max_tokens_per_rank)
    found = {"x": rows.x_RH.clone(), "slots": rows.slots_RJ, "weights": rows.weights_RJ.clone()}
    exchange.combine(torch.zeros(rows.x_RH.shape, dtype=torch.float32), x_TH)
    layer.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["uniform", "masked", "duplicates"])
def test_dispatch_is_exact_to_the_bit(stage, run, kind, dtype):
    """Row s * C + t of every rank is token t of rank s, NaN payloads included; all other rows name nobody."""
    tokens, C = (4, 0, 7, 1), 8
    case = Case(stage=stage, shape=SHAPE, tokens=(tokens,), kind=kind, dtype=dtype, capacity=C)
    for rank, found in enumerate(run(arrived, case)):
        for source, count in enumerate(tokens):
            real, padding = (
                slice(source * C, source * C + count),
                slice(source * C + count, source * C + C),
            )
            ids_TK, weights_TK = case.routing(0, source)
            assert not differ(found["x"][real], random_bits(count, SHAPE.hidden, dtype))
            wanted = [slots_by_hand(case, ids, rank) for ids in ids_TK.tolist()]
            assert found["slots"][real].tolist() == wanted
            assert torch.equal(found["weights"][real], weights_TK)
            assert (found["slots"][padding] == -1).all()


def sums_home(group: EPGroup, case: Case, answers: list[float]) -> Tensor:
    """Rank r answers `answers[r]` + a small number that says (source, row) to every row; what comes home."""
    layer = built(group, case)
    x_TH, ids_TK, weights_TK = bring(group, case, 0)
    rows, way = layer.exchange.dispatch(x_TH, ids_TK, weights_TK, case.max_tokens_per_rank)
    y_RH = torch.full(rows.x_RH.shape, answers[group.rank])
    y_RH += torch.arange(len(y_RH))[:, None] * (group.rank == 0)
    home_TH = layer.exchange.combine(y_RH, way)
    layer.close()
    return home_TH


def test_ranks_are_added_in_ascending_order_in_float32(stage, run):
    """1e8, 1, -1e8 and 3 give 3, 4 or 0 in other orders; each row finds the token it belongs to."""
    tokens, C = (3, 0, 2, 4), 4
    case = Case(stage=stage, shape=SHAPE, tokens=(tokens,), capacity=C)
    answers = [1e8, 1.0, -1e8, 3.0]
    for source, home_TH in enumerate(run(sums_home, case, answers)):
        assert home_TH.shape == (tokens[source], SHAPE.hidden)
        for t, row in enumerate(home_TH.tolist()):
            total = np.float32(1e8) + np.float32(source * C + t)
            for answer in answers[1:]:
                total = np.float32(total + np.float32(answer))
            assert row == [float(total)] * SHAPE.hidden


def sums_home_in_half(group: EPGroup, case: Case) -> list[float]:
    return sums_home(group, case, [2048.0, 1.0, 1.0, 1.0])[0].tolist()


def test_sums_are_rounded_once(stage, run):
    """2048 + 1 + 1 + 1 is 2051, 2052 in bfloat16's and float16's nearest; adding in half precision stays at 2048."""
    case = Case(stage=stage, shape=SHAPE, tokens=((1, 1, 1, 1),), dtype=torch.float16, capacity=1)
    first = run(sums_home_in_half, case)[0]
    assert first == [2052.0] * SHAPE.hidden


# ---- what an earlier call left behind


def after_junk(group: EPGroup, case: Case, junk: int | None) -> list[bool]:
    """A full call, junk in every buffer (None: what the call left), a small call: other bits than a fresh layer's?"""
    layer = built(group, case)
    layer(*bring(group, case, 0))
    if junk is not None:
        for buffer in layer.workspace._buffers.values():
            buffer.view(torch.uint8).fill_(junk)
    small = [
        layer(*bring(group, case, call), max_tokens=most) for call, most in ((1, None), (1, 5))
    ]
    layer.close()
    fresh = build_case(group, case)
    wanted = fresh(*bring(group, case, 1))
    fresh.close()
    return [differ(y_TH, wanted) for y_TH in small]


@pytest.mark.parametrize("junk", [None, 0x00, 0x01, 0x7F, 0xFF], ids=str)
def test_3D_small_call_after_a_full_one(stage, run, junk):
    """3D: the small call's bits are a fresh layer's; 0x7F and 0xFF are NaN, 0x01 a row of slot 16843009."""
    case = Case(stage=stage, shape=SHAPE, tokens=((64, 64), (1, 3)), kind="zipf", capacity=64)
    assert run(after_junk, case, junk) == [[False, False]] * 2
