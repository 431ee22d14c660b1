"""Every reason to refuse a layer, with stand-ins for vLLM's objects. The same with real ones: test_in_vllm.py."""

from types import SimpleNamespace

import pytest
import torch

from epmoe.core.capabilities import Capabilities
from epmoe.vllm_plugin.share import Share
from epmoe.vllm_plugin.support import LayerParts, capture_sizes_over, reasons_against

UnquantizedFusedMoEMethod = type("UnquantizedFusedMoEMethod", (), {})
RoutedExperts = type("RoutedExperts", (), {})
Router = type("FusedTopKRouter", (), {})
CAPTURABLE = Capabilities(graph_capturable=True)


def parts(device="cpu", **changes) -> LayerParts:
    """A layer that can be served, with `changes` such as moe__has_bias=True."""
    grid = SimpleNamespace(
        enable_eplb=False,
        pcp_size=1,
        use_ep=True,
        ep_size=2,
        use_all2all_kernels=True,
        all2all_backend="allgather_reducescatter",
    )
    moe = SimpleNamespace(
        hidden_dim=64,
        hidden_dim_unpadded=64,
        intermediate_size_per_partition=32,
        intermediate_size_per_partition_unpadded=32,
        activation=SimpleNamespace(value="silu"),
        has_bias=False,
        is_lora_enabled=False,
        num_experts=8,
        num_logical_experts=8,
        experts_per_token=2,
        skip_final_all_reduce=False,
        swiglu_limit=None,
        swiglu_alpha=None,
        swiglu_beta=None,
        moe_parallel_config=grid,
    )
    experts = RoutedExperts()
    vars(experts).update(
        quant_method=UnquantizedFusedMoEMethod(),
        apply_router_weight_on_input=False,
        params_dtype=torch.bfloat16,
        expert_map_manager=SimpleNamespace(num_fused_shared_experts=0),
    )
    parallel = SimpleNamespace(
        pipeline_parallel_size=1, data_parallel_size=2, enable_elastic_ep=False
    )
    compilation = SimpleNamespace(
        cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE"), max_cudagraph_capture_size=512
    )
    router, extras = Router(), {}
    places = {
        "moe": moe,
        "grid": grid,
        "experts": experts,
        "manager": vars(experts)["expert_map_manager"],
        "parallel": parallel,
        "compilation": compilation,
    }
    for name, value in changes.items():
        place, _, attribute = name.partition("__")
        if place == "extras":
            extras[attribute] = value
        elif place == "router":
            router = value
        else:
            setattr(places[place], attribute, value)
    return LayerParts(
        moe=moe,
        experts=experts,
        router=router,
        config=SimpleNamespace(parallel_config=parallel, compilation_config=compilation),
        extras=extras,
        device_type=device,
        arch=(9, 0) if device == "cuda" else None,
        transport="nccl" if device == "cuda" else "gloo",
    )


def test_a_plain_layer_has_no_reason_against_it():
    assert reasons_against(parts(), Capabilities()) == []
    assert reasons_against(parts("cuda"), CAPTURABLE) == []


REASONS = [
    ({"experts__quant_method": type("Fp8MoEMethod", (), {})()}, "held by Fp8MoEMethod"),
    ({"moe__hidden_dim": 128}, "padded hidden_dim from 64 to 128"),
    ({"moe__intermediate_size_per_partition": 128}, "padded intermediate_size_per_partition"),
    ({"moe__activation": SimpleNamespace(value="gelu")}, "activation gelu"),
    ({"moe__has_bias": True}, "have a bias"),
    ({"experts__apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
    ({"moe__swiglu_limit": 7.0}, "swiglu_limit=7.0"),
    ({"moe__swiglu_alpha": 1.7}, "swiglu_alpha=1.7"),
    ({"moe__swiglu_beta": 1.0}, "swiglu_beta=1.0"),
    ({"moe__is_lora_enabled": True}, "--enable-lora"),
    ({"router__": type("ZeroExpertRouter", (), {})()}, "zero experts"),
    ({"extras__routed_input_transform": object()}, "routed_input_transform"),
    ({"extras__routed_output_transform": object()}, "routed_output_transform"),
    ({"grid__enable_eplb": True}, "--enable-eplb"),
    ({"moe__num_experts": 12}, "12 places for 8 experts"),
    ({"manager__num_fused_shared_experts": 1}, "fused into the routed"),
    ({"parallel__enable_elastic_ep": True}, "elastic"),
    ({"grid__pcp_size": 2}, "context parallelism (size 2)"),
    ({"parallel__pipeline_parallel_size": 2}, "pipeline parallelism (size 2)"),
    ({"grid__use_ep": False}, "add --enable-expert-parallel"),
    ({"extras__enable_dbo": True}, "--enable-dbo"),
    ({"grid__all2all_backend": "deepep_low_latency"}, "--all2all-backend deepep_low_latency"),
    ({"moe__skip_final_all_reduce": True}, "reduce_results=False"),
]


@pytest.mark.parametrize(("changes", "words"), REASONS, ids=[words for _, words in REASONS])
def test_each_reason(changes, words):
    (reason,) = reasons_against(parts(**changes), Capabilities())
    assert words in reason


def test_experts_of_another_class():
    layer = parts()
    layer.experts.__class__ = type("SubstitutedRoutedExperts", (RoutedExperts,), {})
    (reason,) = reasons_against(layer, Capabilities())
    assert "SubstitutedRoutedExperts, not RoutedExperts" in reason


def test_all_reasons_come_at_once():
    found = reasons_against(parts(moe__has_bias=True, grid__pcp_size=2), Capabilities())
    assert len(found) == 2


def test_a_stage_that_waits_for_the_host_refuses_graphs_and_names_the_option():
    (reason,) = reasons_against(parts("cuda"), Capabilities())
    assert "--enforce-eager" in reason
    assert "cudagraph_mode FULL_AND_PIECEWISE" in reason
    eager = parts("cuda", compilation__cudagraph_mode=SimpleNamespace(name="NONE"))
    assert reasons_against(eager, Capabilities()) == []
    undecided = parts("cuda", compilation__cudagraph_mode=None)
    assert len(reasons_against(undecided, Capabilities())) == 1


def test_what_the_stage_declares_counts_too():
    can = Capabilities(dtypes=(torch.float32,), max_topk=1, min_arch=(9, 5))
    assert len(reasons_against(parts(), can)) == 2
    assert any("compute capability (9, 0)" in why for why in reasons_against(parts("cuda"), can))


def test_a_graph_has_to_fit_into_one_round():
    config = parts("cuda").config
    assert capture_sizes_over(256, Share(), config, "cuda") == 512
    assert capture_sizes_over(512, Share(), config, "cuda") is None
    assert capture_sizes_over(256, Share(0, 2), config, "cuda") is None
    assert capture_sizes_over(256, Share(), config, "cpu") is None
