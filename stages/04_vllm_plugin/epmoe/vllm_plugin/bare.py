"""vLLM's MoE layer without an engine: what vLLM would set up around it, and no more. Imports vLLM.

with world(dp=2, tp=1, rank=0, device="cpu", max_tokens=64) as config:
    runner = make(config, shape, torch.float32)
    load(runner, weights)                      # the experts that live here
    y_TH = call(config, runner, x_TH, logits_TE)
"""

# pyright: reportMissingImports=false
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.config import DeviceConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.vllm import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.plugins import load_general_plugins

from epmoe.core.shape import MoEShape
from epmoe.core.weights import ExpertWeights


@contextmanager
def world(
    dp: int, tp: int, rank: int, device: str, max_tokens: int, **parallel: Any
) -> Iterator[VllmConfig]:
    """vLLM's process groups for `rank` of dp * tp, and its configuration made current. Collective.

    Args:
        dp, tp, rank: data-parallel rank is rank // tp.
        device: "cpu" or "cuda".
        max_tokens: the most tokens of a step, from which the plugin takes its capacity.
        parallel: more for vLLM's ParallelConfig.
    """
    arguments = {"enable_expert_parallel": dp * tp > 1} | parallel
    settings = ParallelConfig(
        tensor_parallel_size=tp,
        data_parallel_size=dp,
        data_parallel_rank=rank // tp,
        distributed_executor_backend="external_launcher" if dp * tp > 1 else None,
        **arguments,
    )
    settings.is_moe_model, settings.disable_nccl_for_dp_synchronization = True, True
    config = VllmConfig(
        parallel_config=settings,
        device_config=DeviceConfig(device),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=max_tokens,
            max_model_len=max_tokens,
            max_num_seqs=min(8, max_tokens),
            is_encoder_decoder=False,
        ),
    )
    backend = "gloo" if device == "cpu" else "nccl"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    load_general_plugins()
    with set_current_vllm_config(config):
        init_distributed_environment(
            dp * tp, rank, "env://", rank if device == "cuda" else 0, backend
        )
        initialize_model_parallel(tensor_model_parallel_size=tp, backend=backend)
        try:
            yield config
        finally:
            cleanup_dist_env_and_memory()


def make(
    config: VllmConfig,
    shape: MoEShape,
    dtype: torch.dtype,
    bias_E: Tensor | None = None,
    name: str = "layers.0.experts",
    **arguments: Any,
) -> Any:
    """The runner of one layer of routed experts, empty; `arguments` are more for vLLM's factory."""
    router = shape.router
    given: dict[str, Any] = {
        "num_experts": shape.experts,
        "top_k": shape.topk,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "params_dtype": dtype,
        "renormalize": router.renormalize,
        "prefix": name,
    }
    if router.scoring == "sigmoid":
        given |= {
            "scoring_func": "sigmoid",
            "use_grouped_topk": True,
            "num_expert_group": router.groups,
            "topk_group": router.topk_groups,
            "routed_scaling_factor": router.scale,
            "e_score_correction_bias": bias_E,
        }
    with torch.device(config.device_config.device):
        return FusedMoEFactory(**(given | arguments))


def load(runner: Any, weights: ExpertWeights) -> None:
    """Give vLLM's loader all E experts, as a checkpoint would; each rank keeps its own."""
    experts, inner = runner.routed_experts, weights.intermediate
    for expert in range(weights.experts):
        parts = {
            "w1": weights.w13_E2IH[expert, :inner],
            "w3": weights.w13_E2IH[expert, inner:],
            "w2": weights.w2_EHI[expert],
        }
        for shard, tensor in parts.items():
            parameter = experts.w2_weight if shard == "w2" else experts.w13_weight
            name = f"experts.{expert}.{shard}.weight"
            experts.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)
    experts.quant_method.process_weights_after_loading(experts)


def call(
    config: VllmConfig,
    runner: Any,
    x_TH: Tensor,
    logits_TE: Tensor,
    tokens: int | None = None,
    **context: Any,
) -> Tensor:
    """One forward pass as vLLM makes it: ranks agree on their tokens first. Collective.

    Args:
        tokens: of this data-parallel rank, where its tensor-parallel ranks bring parts of them; T otherwise.
        context: more for vLLM's forward context, such as is_padding.
    """
    count = len(x_TH) if tokens is None else tokens
    with torch.inference_mode(), set_forward_context(None, config, num_tokens=count, **context):
        return runner(x_TH, logits_TE)
