"""The kernels against plain torch, on a GPU where there is one, else through Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: @triton.jit looks at it

from epmoe.core.errors import InputError
from epmoe.core.packed_rows import RowLayout
from epmoe.core.placement import contiguous
from epmoe.core.routing import RouterConfig, route
from epmoe.fused_triton import kernels as kn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = 0x7F7F7F7F


def tables(experts: int, ranks: int):
    placement = contiguous(experts, ranks)
    as_int = {"dtype": torch.int32, "device": DEVICE}
    return torch.tensor(placement.owners, **as_int), torch.tensor(placement.slots, **as_int)


def pack(x, ids, weights, experts, ranks, capacity, **router):
    owner_E, slot_E = tables(experts, ranks)
    size = RowLayout(x.shape[1], ids.shape[1], x.dtype).row_bytes
    send = torch.full(
        (ranks, capacity, size), 0xFF, dtype=torch.uint8, device=DEVICE
    )  # NaN everywhere
    kn.route_and_pack(x, owner_E, slot_E, send, ids, weights, **router)
    return send


def random_ids(tokens: int, topk: int, experts: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    ids = scores.argsort(dim=1)[:, :topk].to(torch.int32)
    weights = torch.rand(tokens, topk, generator=generator)
    return ids.to(DEVICE), weights.to(DEVICE)


TOY_IDS = torch.tensor([[[0, 1], [1, 2]], [[2, 3], [0, 3]]], dtype=torch.int32)
TOY_WEIGHTS = torch.tensor([0.75, 0.25]).expand(2, 2, 2).contiguous()


def toy_recv(rank: int):
    """What `rank` receives in the toy: H = 4, token t holds the value t + 1."""
    sends = []
    for source in (0, 1):
        x = torch.tensor([2.0 * source + 1, 2.0 * source + 2])[:, None].expand(2, 4).contiguous()
        sends.append(
            pack(x.to(DEVICE), TOY_IDS[source].to(DEVICE), TOY_WEIGHTS[source].to(DEVICE), 4, 2, 2)
        )
    return torch.stack([send[rank] for send in sends])


def test_toy_rows_carry_local_ids_weights_and_the_flag():
    layout = RowLayout(4, 2, torch.float32)
    rows = kn.prepare_rows(layout.unpack(toy_recv(0)), 2)
    assert rows.slots_RJ.tolist() == [[0, 1], [1, -1], [-1, -1], [0, -1]]
    assert rows.weights_RJ.tolist() == [[0.75, 0.25], [0.75, 0.0], [0.0, 0.0], [0.75, 0.0]]
    assert rows.x_RH[:, 0].tolist() == [1.0, 2.0, 0.0, 4.0]
    assert layout.valid(toy_recv(1)).flatten().tolist() == [1] * 4
    assert layout.unpack(toy_recv(1)).slots_RJ[1].tolist() == [-1, 0]


def test_toy_router_prefers_low_ids_and_renormalises():
    logits = torch.tensor([[-9, 1.0986123, 0, -9], [1, 1, 1, 1]], device=DEVICE)
    ids, weights = kn.route_tokens(logits, 2, RouterConfig())
    assert ids.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.75, 0.25], [0.5, 0.5]]))


ROUTERS = [
    RouterConfig(),
    RouterConfig(renormalize=False, scale=2.0),
    RouterConfig(scoring="sigmoid", scale=2.5),
    RouterConfig(scoring="sigmoid", groups=8, topk_groups=3, scale=2.5),
    RouterConfig(scoring="sigmoid", groups=4, topk_groups=2, renormalize=False),
]


@pytest.mark.parametrize(
    "config", ROUTERS, ids=lambda c: f"{c.scoring}-G{c.groups}-r{c.renormalize:d}"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_router_equals_the_reference(config, dtype, bias):
    generator = torch.Generator().manual_seed(1)
    # float16 logits on a grid: many ties
    logits = (torch.randn(9, 72, generator=generator) * 4).round().div(4).to(dtype)
    size = 0.001 if config.scoring == "softmax" else 0.1
    bias_E = torch.randn(72, generator=generator) * size if bias else None
    want_ids, want_weights = route(logits, config, 6, bias_E)
    device_bias = None if bias_E is None else bias_E.to(DEVICE)
    ids, weights = kn.route_tokens(logits.to(DEVICE), 6, config, device_bias)
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("experts", "topk"),
    [
        (1, 1),
        (3, 3),
        (7, 5),
        (63, 7),
        (64, 10),
        (65, 6),
        (160, 32),
        (1023, 8),
        (1024, 1),
        (1025, 3),
        (2048, 2),
    ],
)
def test_router_takes_any_expert_count(experts, topk):
    logits = torch.randn(2, experts, generator=torch.Generator().manual_seed(experts))
    ids, weights = kn.route_tokens(logits.to(DEVICE), topk, RouterConfig())
    want_ids, want_weights = route(logits, RouterConfig(), topk)
    assert torch.equal(ids.cpu(), want_ids)
    torch.testing.assert_close(weights.cpu(), want_weights, rtol=1e-5, atol=1e-7)


def test_one_expert_per_token_weighs_exactly_one():
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for scoring in ("softmax", "sigmoid"):
        config = RouterConfig(scoring=scoring)
        assert kn.route_tokens(logits, 1, config)[1].tolist() == [[1.0]] * 5


@pytest.mark.parametrize(
    ("experts", "topk", "rule"),
    [
        (4, 5, {}),
        (4, 0, {}),
        (64, 33, {}),
        (9, 2, {"groups": 2}),
        (8, 5, {"groups": 4, "topk_groups": 2}),
    ],
)
def test_router_refuses_sizes_it_cannot_serve(experts, topk, rule):
    with pytest.raises(InputError, match="experts"):
        kn.route_tokens(torch.zeros(1, experts, device=DEVICE), topk, RouterConfig(**rule))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pack_treats_bad_ids_as_no_expert_and_leaves_padding_inert(dtype):
    ids = torch.tensor([[-1, 2], [4, 3], [9, -7]], dtype=dtype, device=DEVICE)
    weights = torch.full((3, 2), 0.5, device=DEVICE)
    send = pack(torch.ones(3, 6, device=DEVICE), ids, weights, 4, 2, 5)
    layout = RowLayout(6, 2, torch.float32)
    seen = [kn.prepare_rows(layout.unpack(send[d]), 2).slots_RJ.tolist() for d in (0, 1)]
    nothing = [-1, -1]
    assert seen[0] == [nothing] * 5
    assert seen[1] == [[-1, 0], [-1, 1], nothing, nothing, nothing]


def test_ids_beyond_32_bits_name_no_expert():
    """Narrowed before they are looked at, 2**32 + 3 would be expert 3 and -2**32 expert 0."""
    ids = torch.tensor([[2**32 + 3, 1], [-(2**32), 2**63 - 1]], device=DEVICE)
    send = pack(
        torch.ones(2, 6, device=DEVICE), ids, torch.full((2, 2), 0.5, device=DEVICE), 4, 1, 2
    )
    assert RowLayout(6, 2, torch.float32).slots(send[0]).tolist() == [[-1, 1], [-1, -1]]


def test_packed_rows_are_bitwise_the_tokens_also_from_strided_rows():
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    x = x[:, 1:66]
    assert not x.is_contiguous()
    ids, weights = random_ids(5, 3, 8)
    send = pack(x, ids, weights, 8, 2, 7)
    for d in (0, 1):
        layout = RowLayout(65, 3, torch.float16)
        assert torch.equal(layout.x(send[d])[:5], x)
        assert layout.valid(send[d]).tolist() == [1] * 5 + [0] * 2


@pytest.mark.parametrize("shape", [(0, 6), (3, 1)], ids=["no-token", "one-value"])
def test_strides_that_mean_nothing_are_taken(shape):
    """A transposed tensor without rows, or with rows of one value, is dense whatever its strides say."""
    x = torch.ones(shape[1], shape[0], device=DEVICE).T
    ids, weights = random_ids(shape[0], 2, 4)
    send = pack(x, ids, weights, 4, 2, 3)
    layout = RowLayout(shape[1], 2, torch.float32)
    assert layout.valid(send[0]).tolist() == [1] * shape[0] + [0] * (3 - shape[0])
    assert layout.x(send[0])[: shape[0]].eq(1).all()


def test_routing_while_packing_equals_routing_then_packing():
    generator = torch.Generator().manual_seed(3)
    x, logits = torch.randn(4, 32, generator=generator), torch.randn(4, 12, generator=generator)
    x, logits = x.to(DEVICE), logits.to(DEVICE)
    rule = RouterConfig(scoring="sigmoid", scale=1.5)
    ids, weights = kn.route_tokens(logits, 3, rule)
    seen_ids, seen_weights = torch.full_like(ids, POISON), torch.full_like(weights, float("nan"))
    both = pack(x, seen_ids, seen_weights, 12, 3, 5, logits_TE=logits, rule=rule)
    split = pack(x, ids, weights, 12, 3, 5)
    assert torch.equal(seen_ids, ids)
    assert torch.equal(seen_weights, weights)
    assert torch.equal(both, split)


def test_wrong_buffers_are_refused_by_name():
    x, (ids, weights) = torch.zeros(2, 4, device=DEVICE), random_ids(2, 2, 4)
    with pytest.raises(InputError, match="2 tokens do not fit capacity 1"):
        pack(x, ids, weights, 4, 2, 1)
    with pytest.raises(InputError, match="topk_weights"):
        pack(x, ids, weights.half(), 4, 2, 2)
    with pytest.raises(InputError, match="x has strided rows"):
        pack(torch.zeros(2, 8, device=DEVICE)[:, ::2], ids, weights, 4, 2, 2)
    slots, rows = torch.zeros(6, 2, dtype=torch.int32, device=DEVICE), torch.zeros(12, 4)
    with pytest.raises(InputError, match=r"ret has shape \(2, 3, 4\): expected \(6, 4\)"):
        kn.reduce_slots(slots, rows.to(DEVICE), 2, torch.zeros(2, 3, 4, device=DEVICE))
    owner_E, slot_E = tables(4, 2)
    send = torch.zeros(2, 2, 32, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(InputError, match=r"a row of send has shape \(32,\): expected \(48,\)"):
        kn.route_and_pack(x, owner_E, slot_E, send, ids, weights)
