"""gate_up, down, reduce, merge: against plain float64 torch, and through a whole layer of EP ranks in one process."""

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: @triton.jit looks at it

from epmoe.core.errors import InputError
from epmoe.core.packed_rows import RowLayout
from epmoe.core.placement import contiguous
from epmoe.fused_triton import kernels as kn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = kn.GemmConfig(16, 16, 16, 1, 4)


def draw(*shape: int, seed: int, dtype=torch.float32, scale: float = 1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def random_layer(tokens, hidden, inner, experts, topk, ranks, dtype, seed=0):
    """x, ids, weights of every rank, and the experts' weights; down-projections scaled by e + 1."""
    x = draw(ranks, tokens, hidden, seed=seed, dtype=dtype)
    ids = draw(ranks, tokens, experts, seed=seed + 1).argsort(dim=2)[:, :, :topk].to(torch.int32)
    weights = draw(ranks, tokens, topk, seed=seed + 2).abs()
    w13 = draw(experts, 2 * inner, hidden, seed=seed + 3, dtype=dtype, scale=hidden**-0.5)
    w2 = draw(experts, hidden, inner, seed=seed + 4, scale=inner**-0.5)
    w2 = (w2 * torch.arange(1, experts + 1)[:, None, None]).to(dtype)
    return x, ids, weights, w13, w2


def expected(x_TH, ids_TK, weights_TK, w13, w2):
    """Two loops in float64, sharing no index with the kernels."""
    inner = w2.shape[2]
    y_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    for t in range(x_TH.shape[0]):
        for expert, weight in zip(ids_TK[t].tolist(), weights_TK[t].double(), strict=True):
            if 0 <= expert < w13.shape[0]:
                both = w13[expert].double() @ x_TH[t].double()
                h = torch.nn.functional.silu(both[:inner]) * both[inner:]
                y_TH[t] += weight * (w2[expert].double() @ h)
    return y_TH


def run_owner(recv, w13, w2, ranks, config, down_config=None, rows_dtype=torch.float32, topk=2):
    """All of an owner rank's work on a received buffer; every buffer starts as NaN."""
    hidden, inner = w13.shape[2], w2.shape[2]
    rows = RowLayout(hidden, topk, w13.dtype).unpack(recv)
    slots, experts = rows.slots_RJ.numel(), w13.shape[0]
    tiles = kn.group_slots(
        rows.slots_RJ, experts, kn.make_tiles(slots, experts, config.tile_rows, DEVICE)
    )
    h_NI = torch.full((slots, inner), float("nan"), dtype=w13.dtype, device=DEVICE)
    rows_NH = torch.full((slots, hidden), float("nan"), dtype=rows_dtype, device=DEVICE)
    ret = torch.full((*recv.shape[:2], hidden), float("nan"), device=DEVICE)
    kn.gate_up(rows, w13, tiles, h_NI, config, ranks=ranks, scratch=rows_NH)
    kn.down(rows, h_NI, w2, tiles, rows_NH, down_config or config, ranks=ranks)
    kn.reduce_slots(rows.slots_RJ, rows_NH, experts, ret.view(-1, hidden))
    return ret


def run_layer(layer, config, capacity=None, **kwargs):
    """EP ranks in one process; the exchanges are transposes."""
    x, ids, weights, w13, w2 = layer
    ranks, tokens, hidden = x.shape
    capacity, topk = capacity or tokens, ids.shape[2]
    place = contiguous(w13.shape[0], ranks)
    owner_E = torch.tensor(place.owners, dtype=torch.int32, device=DEVICE)
    slot_E = torch.tensor(place.slots, dtype=torch.int32, device=DEVICE)
    size = RowLayout(hidden, topk, x.dtype).row_bytes
    send = torch.full((ranks, ranks, capacity, size), 0xFF, dtype=torch.uint8, device=DEVICE)
    for source in range(ranks):
        local = (x[source].to(DEVICE), owner_E, slot_E, send[source])
        kn.route_and_pack(*local, ids[source].to(DEVICE), weights[source].to(DEVICE))
    recv = send.transpose(0, 1).contiguous()
    ret = torch.stack(
        [
            run_owner(
                recv[d],
                w13[list(place.experts_of(d))].to(DEVICE),
                w2[list(place.experts_of(d))].to(DEVICE),
                ranks, config, topk=topk, **kwargs,
            )
            for d in range(ranks)
        ]
    )  # fmt: skip
    back = ret.transpose(0, 1).contiguous()
    y = torch.full_like(x, float("nan"), device=DEVICE)
    for source in range(ranks):
        kn.merge_ranks(back[source], y[source])
    return y.cpu()


def assert_layer(layer, y, tolerance):
    """Compare every rank's output; the message names the worst token and its experts."""
    x, ids, weights, w13, w2 = layer
    for rank in range(x.shape[0]):
        want = expected(x[rank], ids[rank], weights[rank], w13, w2)
        if want.numel() == 0:
            continue
        error = (y[rank].double() - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-6)
        worst = int(error.nan_to_num(1e9).argmax())
        assert error[worst] < tolerance, (
            f"rank {rank} token {worst} experts {ids[rank, worst].tolist()} weights"
            f" {weights[rank, worst].tolist()}: relative error {error[worst]:.3g}"
        )


SHAPES = {  # tokens, hidden, inner, experts, topk, ranks
    "plain": (3, 32, 32, 8, 2, 2),
    "T1": (1, 32, 16, 8, 2, 2),
    "odd-H-I": (3, 37, 23, 6, 3, 2),
    "K=E": (2, 16, 16, 4, 4, 2),
    "one-rank": (5, 48, 32, 3, 1, 1),
    "E-not-divided": (2, 32, 16, 5, 2, 3),
    "rank-without-expert": (2, 16, 16, 2, 1, 3),
    "no-tokens": (0, 16, 16, 4, 2, 2),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_layer_equals_the_loops(shape, dtype):
    layer = random_layer(*SHAPES[shape], dtype)
    assert_layer(layer, run_layer(layer, SMALL, capacity=SHAPES[shape][0] + 1), TOLERANCE[dtype])


VARIANTS = {
    "swap": replace(SMALL, swap_ab=True),
    "grouped": replace(SMALL, group_m=3),
    "persistent": replace(SMALL, waves=1),
    "persistent-swap-grouped": replace(SMALL, waves=1, swap_ab=True, group_m=2),
    "tma": replace(SMALL, tma=True),
    "tma-rows": replace(SMALL, tma=True, tma_rows=True),
    "tma-swap": replace(SMALL, tma=True, tma_rows=True, swap_ab=True),
    "rest": replace(SMALL, tma=True, tma_rows=True, block_r=16, waves=1),
    "wide": kn.GemmConfig(32, 64, 32, 2, 4),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(4, 48, 40, 6, 2, 2), (4, 37, 23, 6, 2, 2)], ids=["even", "odd"])
def test_schedules_agree_with_the_loops(variant, shape):
    layer = random_layer(*shape, dtype=torch.float16, seed=11)
    if variant == "rest" and shape[1] % 8:
        with pytest.raises(InputError, match="block_r=16 needs rows of a multiple of 16 bytes"):
            run_layer(layer, VARIANTS[variant])
        return
    assert_layer(layer, run_layer(layer, VARIANTS[variant]), TOLERANCE[torch.float16])


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_all_tokens_on_one_rank_and_one_expert(tokens):
    x, ids, weights, w13, w2 = random_layer(tokens, 16, 16, 4, 1, 2, torch.float32, seed=tokens)
    layer = x, torch.full_like(ids, 3), weights, w13, w2
    for config in (SMALL, VARIANTS["rest"], VARIANTS["tma-rows"]):
        assert_layer(layer, run_layer(layer, config), TOLERANCE[torch.float32])


@pytest.mark.parametrize("trips", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_pipeline_depth_never_changes_the_result(trips, stages):
    layer = random_layer(2, 16 * trips, 16 * trips, 4, 2, 1, torch.float16, seed=trips)
    config = replace(SMALL, num_stages=stages)
    assert torch.equal(run_layer(layer, config), run_layer(layer, replace(config, num_stages=1)))


def test_masked_and_repeated_ids_count_per_assignment():
    x, _, _, w13, w2 = random_layer(4, 16, 16, 8, 2, 2, torch.float32, seed=5)
    ids = torch.tensor([[[3, 3], [-1, 4], [-1, -1], [2, 7]]] * 2, dtype=torch.int32)
    weights = torch.tensor([0.25, 0.75]).expand(2, 4, 2).contiguous()
    layer = x, ids, weights, w13, w2
    y = run_layer(layer, SMALL)
    assert_layer(layer, y, 1e-5)
    assert y[:, 2].abs().max() == 0


def test_second_call_does_not_see_the_first_and_bits_repeat():
    layer = random_layer(3, 32, 16, 6, 2, 2, torch.float16, seed=9)
    first = run_layer(layer, SMALL)
    run_layer(random_layer(7, 32, 16, 6, 2, 2, torch.float16, seed=10), SMALL)
    assert torch.equal(run_layer(layer, SMALL), first)


def test_float16_rows_beyond_its_range_survive_until_the_weight():
    x = torch.ones(1, 1, 16, dtype=torch.float16)
    w13 = torch.full((1, 32, 16), 0.25, dtype=torch.float16)  # gate = up = 4, silu(4) * 4 = 15.7
    w2 = torch.full((1, 16, 16), 400.0, dtype=torch.float16)  # 16 * 15.7 * 400 = 1e5 > 65504
    layer = x, torch.zeros(1, 1, 1, dtype=torch.int32), torch.full((1, 1, 1), 0.1), w13, w2
    for rows_dtype in (torch.float32, torch.float16):
        y = run_layer(layer, SMALL, rows_dtype=rows_dtype)
        assert torch.isfinite(y).all()
        assert_layer(layer, y, 5e-3)


def test_merge_adds_ranks_in_order_and_the_ring_rounds_after_each():
    back = (
        torch.tensor([2048.0, 1.0, 1.0, 1.0], device=DEVICE)[:, None, None]
        .expand(4, 2, 3)
        .contiguous()
    )
    y = torch.full((1, 3), float("nan"), dtype=torch.float16, device=DEVICE)
    kn.merge_ranks(back, y)
    assert y.tolist() == [[2052.0] * 3]  # 2051 in float32, rounded once
    kn.merge_ranks(back, y, ring=True)
    assert y.tolist() == [[2048.0] * 3]  # 2049 is a tie to even, three times


@pytest.mark.parametrize("shape", ["plain", "odd-H-I"])
def test_bfloat16_canary(shape):
    """The interpreter holds bfloat16 as raw 16-bit integers: a wrong product is off by orders of magnitude."""
    layer = random_layer(*SHAPES[shape], torch.bfloat16)
    assert_layer(layer, run_layer(layer, SMALL), TOLERANCE[torch.bfloat16])


def test_gemm_buffers_are_refused_by_name():
    layout = RowLayout(16, 2, torch.float16)
    rows = layout.unpack(torch.zeros(1, 2, layout.row_bytes, dtype=torch.uint8))
    tiles = kn.make_tiles(4, 1, 16, "cpu")
    w13, h = torch.zeros(1, 32, 16, dtype=torch.float16), torch.zeros(4, 16, dtype=torch.float16)
    with pytest.raises(
        InputError, match=r"w13 has shape .* strides \(512, 1, 32\).* pass w13\.contiguous"
    ):
        kn.gate_up(rows, w13.mT.contiguous().mT, tiles, h, SMALL)
    with pytest.raises(InputError, match=r"w13 has dtype torch\.float32"):
        kn.gate_up(rows, w13.float(), tiles, h, SMALL)
    with pytest.raises(InputError, match=r"h has shape \(4, 8\): expected \(4, 16\)"):
        kn.gate_up(rows, w13, tiles, h[:, :8].contiguous(), SMALL)
    with pytest.raises(InputError, match="tile_rows=16, the config 32"):
        kn.gate_up(rows, w13, tiles, h, replace(SMALL, block_m=32))
    with pytest.raises(InputError, match="1 experts, the weights hold 2"):
        kn.gate_up(rows, w13.repeat(2, 1, 1), tiles, h, SMALL)


LIMITS = (65536, 101376, 166912, 232448)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("rows", [0, 1, 64, 1000, 3000, 16384, 65536, 500000])
@pytest.mark.parametrize("tma", [False, True], ids=["", "tma"])
def test_chosen_tiles_fit_shared_memory(limit, itemsize, rows, tma):
    for hidden, inner in ((4096, 2048), (2048, 768), (90, 7)):
        chosen = kn.choose(
            kn.DeviceLimits(limit, tma),
            hidden=hidden,
            intermediate=inner,
            local_experts=72,
            itemsize=itemsize,
            rows=rows,
        )
        assert chosen.gate_up.shared_bytes(2, itemsize) <= limit
        assert chosen.down.shared_bytes(1, itemsize) <= limit
        assert chosen.gate_up.tile_rows == chosen.down.tile_rows == chosen.tile_rows
        assert tma or not (chosen.gate_up.tma or chosen.gate_up.tma_rows or chosen.down.tma)


def test_rows_that_waste_fewer_decide_the_tile():
    shape = {"hidden": 4096, "intermediate": 2048, "local_experts": 72, "itemsize": 2}
    limits = kn.DeviceLimits(232448, tma=True)
    assert kn.choose(limits, rows=227 * 72, **shape).tile_rows == 128  # 256 computed, not 384
    assert kn.choose(limits, rows=910 * 72, **shape).tile_rows == 192  # 960 computed, not 1024


@pytest.mark.parametrize("limit", LIMITS)
def test_tuner_space_fits_and_is_not_empty(limit):
    for weight_tiles in (1, 2):
        space = list(kn.config_space(kn.DeviceLimits(limit), 16, weight_tiles))
        assert len(space) >= 5
        assert max(config.shared_bytes(weight_tiles, 2) for config in space) <= limit


def test_configs_refuse_what_cannot_run():
    with pytest.raises(InputError, match="block_n=48"):
        kn.GemmConfig(block_n=48)
    with pytest.raises(InputError, match=r"gate_up\.tile_rows=16"):
        kn.LayerConfig(kn.GemmConfig(16), kn.GemmConfig(32))
    with pytest.raises(InputError, match="shared_memory=1024"):
        kn.DeviceLimits(1024)
