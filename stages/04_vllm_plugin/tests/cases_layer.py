"""What a stage gets from vLLM, and what vLLM adds around it."""

# pyright: reportMissingImports=false
import os

import torch
from cases_bench import (
    FIRST,
    SMALL,
    Spy,
    by_hand,
    changed,
    inputs,
    near,
    refused,
    using,
)

from epmoe.core.routing import RouterConfig
from epmoe.core.weights import ExpertWeights, random_weights
from epmoe.vllm_plugin import bare, layout

# ---- what vLLM hands over


def case_weights_stay_where_vllm_put_them(bench):
    """No copy, the checkpoint's meaning, in all shapes where a size could be mistaken for another (H = 2I, H = I)."""
    for hidden, inner in ((64, 96), (64, 32), (64, 64)):
        shape = SMALL.with_(hidden=hidden, intermediate=inner)
        weights = random_weights(shape, range(8))
        runner = bench.make(shape, weights=weights)
        held = runner.staged.layer.spec.weights
        assert held.w13_E2IH.data_ptr() == runner.routed_experts.w13_weight.data_ptr()
        assert held.w2_EHI.data_ptr() == runner.routed_experts.w2_weight.data_ptr()
        assert torch.equal(held.w13_E2IH, weights.w13_E2IH), f"w13 differs at H={hidden}, I={inner}"
        assert torch.equal(held.w2_EHI, weights.w2_EHI), f"w2 differs at H={hidden}, I={inner}"


def case_gate_and_up_are_asked_for_not_guessed(bench):
    runner = bench.make()
    experts = runner.routed_experts
    assert layout.reasons_against_order(experts) == []
    right = type(experts)._load_w13

    def swapped(self, data, dim, shard, *more, **keywords):
        return right(self, data, dim, {"w1": "w3", "w3": "w1"}[shard], *more, **keywords)

    with changed(type(experts), _load_w13=swapped):
        refused(bench.make, "another order: [3.0, 1.0]")


def case_every_kind_of_router(bench):
    """Against vLLM's own kernels and against two loops by hand: nothing of the routing is lost or applied twice."""
    kinds = {
        "softmax": RouterConfig(),
        "not renormalised": RouterConfig(renormalize=False),
        "sigmoid, scaled": RouterConfig(scoring="sigmoid", scale=2.5),
        "groups": RouterConfig(scoring="sigmoid", groups=4, topk_groups=2, scale=2.5),
        "one expert": RouterConfig(scoring="sigmoid", scale=1.5),
    }
    for name, router in kinds.items():
        shape = SMALL.with_(router=router, topk=1 if name == "one expert" else 3)
        bias_E = torch.linspace(-0.2, 0.3, 8) if router.scoring == "sigmoid" else None
        weights, (x_TH, logits_TE) = random_weights(shape, range(8)), inputs(shape)
        y_TH = bench.call(bench.make(shape, bias_E, weights=weights), x_TH, logits_TE)
        near(y_TH, by_hand(shape, weights, x_TH, logits_TE, bias_E), what=f"{name}, by hand")
        own = bench.native(shape, bias_E, weights=weights)
        near(y_TH, bench.call(own, x_TH, logits_TE), what=f"{name}, vLLM's own")


def case_every_stage(bench):
    weights, (x_TH, logits_TE) = random_weights(SMALL, range(8)), inputs()
    expected = by_hand(SMALL, weights, x_TH, logits_TE)
    for stage in ("00_reference", "01_variable_a2a", "02_fixed_capacity", "03_fused_triton"):
        with using(stage=stage):
            runner = bench.make(weights=weights)
        near(bench.call(runner, x_TH, logits_TE), expected, what=stage)
        told = runner.epmoe_report()
        assert (told["stage"], told["calls"]) == (stage, 1), told


def case_options_reach_the_stage(bench):
    with using(stage="03_fused_triton", options={"without": "merge"}):
        runner = bench.make()
    assert "merge" not in runner.staged.layer.describe()["fusions"]
    with using(stage="03_fused_triton", options={"packing": "merge"}):
        refused(bench.make, "has no option packing")


def case_sixteen_bits(bench):
    """bfloat16 as vLLM serves it; the router's weights stay float32 on their way to the stage."""
    shape = SMALL.with_(topk=8)
    weights = random_weights(shape, range(8), torch.bfloat16)
    x_TH, logits_TE = inputs(shape, dtype=torch.bfloat16)
    runner = bench.make(shape, dtype=torch.bfloat16, weights=weights)
    spy = Spy(runner.staged.layer)
    with changed(runner.staged, layer=spy):
        y_TH = bench.call(runner, x_TH, logits_TE)
    assert y_TH.dtype == torch.bfloat16
    assert [weights_TK.dtype for _, _, weights_TK, _ in spy.calls] == [torch.float32]
    near(y_TH, by_hand(shape, weights, x_TH, logits_TE), 1e-2)


# ---- what vLLM adds around it


class Doubled(torch.nn.Module):
    """A shared expert: S(x) = 2x."""

    def forward(self, x_TH):
        return 2 * x_TH


def case_the_shared_expert_counts_once(bench):
    weights, (x_TH, logits_TE) = random_weights(SMALL, range(8)), inputs()
    zero = ExpertWeights(weights.w13_E2IH, torch.zeros_like(weights.w2_EHI))
    near(bench.call(bench.make(weights=zero, shared_experts=Doubled()), x_TH, logits_TE), 2 * x_TH)
    both = bench.call(bench.make(weights=weights, shared_experts=Doubled()), x_TH, logits_TE)
    near(both - 2 * x_TH, by_hand(SMALL, weights, x_TH, logits_TE), 1e-4)


def case_the_scaling_factor_counts_once(bench):
    """Where vLLM scales the output itself, (out(2.5) - shared) is 2.5 times (out(1) - shared)."""
    shape = SMALL.with_(router=RouterConfig(scoring="sigmoid"))
    weights, (x_TH, logits_TE) = random_weights(shape, range(8)), inputs()
    routed = []
    for scale in (1.0, 2.5):
        more = {"routed_scaling_factor": scale, "apply_routed_scale_to_output": True}
        runner = bench.make(
            shape, torch.zeros(8), weights=weights, shared_experts=Doubled(), **more
        )
        routed.append(bench.call(runner, x_TH, logits_TE) - 2 * x_TH)
    near(routed[1], 2.5 * routed[0], 1e-4)


def case_padding_rows_are_inert(bench):
    """Rows that vLLM marks as padding are routed nowhere, whatever they hold, and real rows do not notice them."""
    x_TH, logits_TE = inputs()
    weights = random_weights(SMALL, range(8))
    alone = bench.call(bench.make(weights=weights), x_TH[:9], logits_TE[:9])
    x_TH[9:] = float("nan")
    padding_T = torch.arange(13) >= 9
    for stage in ("01_variable_a2a", FIRST):
        with using(stage=stage):
            runner = bench.make(weights=weights)
        y_TH = bench.call(runner, x_TH, logits_TE.nan_to_num(), is_padding=padding_T)
        near(y_TH[:9], alone, what=stage)
        assert not y_TH[9:].any(), f"{stage}: padding rows came back as {y_TH[9:]}"


def case_a_mask_that_vllm_no_longer_fills_is_not_read(bench):
    """With VLLM_MOE_SKIP_PADDING=0 vLLM hands the mask over all the same, full of what a capture left in it."""
    x_TH, logits_TE = inputs()
    weights = random_weights(SMALL, range(8))
    runner = bench.make(weights=weights)
    os.environ["VLLM_MOE_SKIP_PADDING"] = "0"
    try:
        y_TH = bench.call(runner, x_TH, logits_TE, is_padding=torch.ones(13, dtype=torch.bool))
    finally:
        del os.environ["VLLM_MOE_SKIP_PADDING"]
    near(y_TH, by_hand(SMALL, weights, x_TH, logits_TE))


def case_strides_and_aliases(bench):
    x_TH, logits_TE = inputs()
    weights = random_weights(SMALL, range(8))
    runner = bench.make(weights=weights)
    expected = bench.call(runner, x_TH, logits_TE)
    wide = torch.zeros(13, 2 * SMALL.hidden)
    wide[:, ::2] = x_TH
    found = bare.call(bench.config, runner, wide[:, ::2], logits_TE)
    near(found, expected)
    assert found.is_contiguous()
    assert found.untyped_storage().data_ptr() != wide.untyped_storage().data_ptr()


def case_a_smaller_capacity_runs_rounds(bench):
    x_TH, logits_TE = inputs(tokens=13)
    weights = random_weights(SMALL, range(8))
    expected = bench.call(bench.make(weights=weights), x_TH, logits_TE)
    for capacity in (1, 4, 12, 13):
        with using(capacity=capacity):
            runner = bench.make(weights=weights)
        near(bench.call(runner, x_TH, logits_TE), expected, what=f"capacity {capacity}")


def case_layers_share_buffers_only_with_their_like(bench):
    wide = SMALL.with_(hidden=128, topk=4)
    pairs = [(SMALL, random_weights(SMALL, range(8))), (wide, random_weights(wide, range(8)))] * 2
    runners = [bench.make(shape, weights=weights) for shape, weights in pairs]
    spaces = [runner.staged.layer.workspace for runner in runners]
    assert spaces[0] is spaces[2]
    assert spaces[1] is spaces[3]
    assert spaces[0] is not spaces[1]
    for seed in range(2):
        for (shape, weights), runner in zip(pairs, runners, strict=True):
            x_TH, logits_TE = inputs(shape, seed=seed)
            near(bench.call(runner, x_TH, logits_TE), by_hand(shape, weights, x_TH, logits_TE))


def case_compiled_models_of_two_stages_are_kept_apart(bench):
    """vLLM finds a compiled model on disk by the hash of its configuration: a stage must be in it."""
    hashes = set()
    for stage in ("01_variable_a2a", FIRST):
        with using(stage=stage):
            bench.make()
        hashes.add(bench.config.compute_hash())
    bench.config.additional_config.pop("epmoe")
    hashes.add(bench.config.compute_hash())
    assert len(hashes) == 3, hashes


def case_many_layers_leak_nothing(bench):
    from torch.distributed import distributed_c10d as c10d

    before = len(c10d._world.pg_map)
    runners = [bench.make() for _ in range(48)]
    assert len(c10d._world.pg_map) == before
    assert len({id(r.staged.shared) for r in runners}) == 1
    assert len({id(r.staged.layer.workspace) for r in runners}) == 1


def case_the_worst_routing_is_tried_for_memory(bench):
    """What vLLM's profiling run triggers on a GPU: all tokens of all ranks to one rank, at full capacity."""
    runner = bench.make()
    spy, capacity = Spy(runner.staged.layer), runner.staged.spec.capacity
    runner.staged.reserve_worst(spy)
    ((x_TH, ids_TK, _, max_tokens),) = spy.calls
    assert (len(x_TH), max_tokens) == (capacity, capacity)
    assert set(ids_TK.flatten().tolist()) == {0, 1}


def case_one_graph_for_all_batches(bench):
    """Under the compiler: no break inside our part, the same numbers, no new graph for another T."""
    from torch._dynamo.testing import CompileCounter
    from vllm.forward_context import set_forward_context

    weights, counter = random_weights(SMALL, range(8)), CompileCounter()
    runner = bench.make(weights=weights)
    compiled = torch.compile(
        lambda x, logits: runner(x, logits) * 2, backend=counter, fullgraph=True, dynamic=True
    )
    for tokens in (9, 17, 5):
        x_TH, logits_TE = inputs(tokens=tokens)
        with torch.no_grad(), set_forward_context(None, bench.config, num_tokens=tokens):
            y_TH = compiled(x_TH.clone(), logits_TE.clone())
        near(y_TH, 2 * by_hand(SMALL, weights, x_TH, logits_TE))
    assert counter.frame_count == 1, f"{counter.frame_count} graphs for three batch sizes"
