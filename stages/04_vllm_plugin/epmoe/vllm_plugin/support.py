"""What a stage cannot do inside vLLM, found before a weight is loaded: every reason at once, in words.

Works on attributes alone, so it can be tested with stand-ins and needs no vLLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from epmoe.core.capabilities import Capabilities, Spec
from epmoe.vllm_plugin.share import Share

PLAIN_METHOD, PLAIN_EXPERTS, DEFAULT_EXCHANGE = (
    "UnquantizedFusedMoEMethod",
    "RoutedExperts",
    "allgather_reducescatter",
)


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """What vLLM made one MoE layer of, and where it runs.

    Attributes:
        moe, experts, router: FusedMoEConfig, RoutedExperts and the router.
        config: VllmConfig.
        extras: what else the runner was given: enable_dbo, transforms.
        device_type: "cpu" or "cuda".
        arch: compute capability, None on a CPU.
        transport: of the expert-parallel group, as in `EPGroup.transport`.
    """

    moe: Any
    experts: Any
    router: Any
    config: Any
    extras: dict[str, Any]
    device_type: str
    arch: tuple[int, int] | None
    transport: str


def reasons_against(parts: LayerParts, can: Capabilities) -> list[str]:
    """Every reason why the stage that declares `can` cannot run this layer; empty when it can."""
    return [
        *_foreign_kernels(parts),
        *_other_mathematics(parts),
        *_moving_experts(parts),
        *_other_parallelism(parts),
        *_graphs(parts, can),
        *can.reasons_against(_needs(parts)),
    ]


def _foreign_kernels(parts: LayerParts) -> Iterator[str]:
    """Weights that are not what the checkpoint holds, or not where the stage would look."""
    method = type(parts.experts.quant_method)
    if method.__name__ != PLAIN_METHOD:
        yield f"the experts are quantised or held by {method.__name__}: only bfloat16, float16 and float32 weights run"
    if type(parts.experts).__name__ != PLAIN_EXPERTS:
        yield f"the experts are {type(parts.experts).__name__}, not {PLAIN_EXPERTS}"
    for name, padded in (
        ("hidden_dim", parts.moe.hidden_dim),
        ("intermediate_size_per_partition", parts.moe.intermediate_size_per_partition),
    ):
        plain = getattr(parts.moe, f"{name}_unpadded")
        if padded != plain:
            yield f"vLLM padded {name} from {plain} to {padded} for its own kernel: use --moe-backend triton"


def _other_mathematics(parts: LayerParts) -> Iterator[str]:
    """Anything but y = sum of w * down(silu(gate x) * up x)."""
    moe, experts = parts.moe, parts.experts
    if moe.activation.value != "silu":
        yield f"activation {moe.activation.value}: only silu with a gate"
    if moe.has_bias:
        yield "the experts have a bias"
    if experts.apply_router_weight_on_input:
        yield "router weights are applied to the input (apply_router_weight_on_input)"
    for name in ("limit", "alpha", "beta"):
        value = getattr(moe, f"swiglu_{name}", None)
        if value is not None:
            yield f"swiglu_{name}={value}: only plain SwiGLU"
    if moe.is_lora_enabled:
        yield "LoRA is enabled (--enable-lora)"
    if type(parts.router).__name__ == "ZeroExpertRouter":
        yield "the model has zero experts, which compute in the router"
    for name in ("routed_input_transform", "routed_output_transform"):
        if parts.extras.get(name) is not None:
            yield f"the model transforms what enters or leaves the experts ({name})"


def _moving_experts(parts: LayerParts) -> Iterator[str]:
    """Expert ids that do not stay where they are, or of which there are more than experts."""
    moe, manager = parts.moe, parts.experts.expert_map_manager
    if moe.moe_parallel_config.enable_eplb:
        yield "experts are rebalanced while serving (--enable-eplb): ids would name places, not experts"
    if moe.num_experts != moe.num_logical_experts:
        yield f"{moe.num_experts} places for {moe.num_logical_experts} experts: no redundant experts"
    if getattr(manager, "num_fused_shared_experts", 0):
        yield "shared experts are fused into the routed ones"
    if parts.config.parallel_config.enable_elastic_ep:
        yield "elastic expert parallelism changes the ranks while serving"


def _other_parallelism(parts: LayerParts) -> Iterator[str]:
    moe = parts.moe
    grid = moe.moe_parallel_config
    if grid.pcp_size > 1:
        yield f"prefill context parallelism (size {grid.pcp_size})"
    if parts.config.parallel_config.pipeline_parallel_size > 1:
        yield f"pipeline parallelism (size {parts.config.parallel_config.pipeline_parallel_size})"
    if parts.config.parallel_config.data_parallel_size > 1 and not grid.use_ep:
        yield "data parallelism without expert parallelism cuts experts in pieces: add --enable-expert-parallel"
    if parts.extras.get("enable_dbo"):
        yield "two batches at once (--enable-dbo) would mix their exchanges"
    if grid.use_all2all_kernels and grid.all2all_backend != DEFAULT_EXCHANGE:
        yield f"--all2all-backend {grid.all2all_backend}: the stage exchanges itself, leave {DEFAULT_EXCHANGE}"
    if moe.skip_final_all_reduce and grid.ep_size > 1:
        yield "the model adds up partial sums itself (reduce_results=False), the stage returns complete ones"


def _graphs(parts: LayerParts, can: Capabilities) -> Iterator[str]:
    mode = parts.config.compilation_config.cudagraph_mode
    if parts.device_type == "cuda" and not can.graph_capturable and graphs_wanted(mode):
        yield (
            f"it waits for the host and vLLM captures CUDA graphs (cudagraph_mode {getattr(mode, 'name', mode)}): "
            "start vLLM with --enforce-eager or -cc.cudagraph_mode=none"
        )


def graphs_wanted(mode: Any) -> bool:
    """Whether vLLM will capture anything; an undecided mode counts as yes."""
    return getattr(mode, "name", str(mode)).upper() != "NONE" or mode is None


def _needs(parts: LayerParts) -> Spec:
    moe = parts.moe
    return Spec(
        dtype=parts.experts.params_dtype,
        device=parts.device_type,
        arch=parts.arch,
        transport=parts.transport,
        topk=moe.experts_per_token,
        experts=moe.num_experts,
    )


def capture_sizes_over(capacity: int, share: Share, config: Any, device_type: str) -> int | None:
    """Tokens that a rank brings to the largest batch that vLLM will capture, where they are more than `capacity`.

    A graph holds one round.
    """
    if device_type != "cuda" or not graphs_wanted(config.compilation_config.cudagraph_mode):
        return None
    largest = share.part(config.compilation_config.max_cudagraph_capture_size or 0)
    return largest if largest > capacity else None
