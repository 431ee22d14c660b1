"""The runner that vLLM makes in place of its own: same loading, gate, router, shared experts and sums around it.

Overridden is the narrow part in which vLLM has chosen experts and wants them run, and what goes with it. Source of
the seam: vLLM's MoERunner (Apache-2.0), vllm/model_executor/layers/fused_moe/runner/moe_runner.py.
"""

# pyright: reportMissingImports=false
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.platforms import current_platform

from epmoe.core import groups, registry
from epmoe.core.errors import UnsupportedError
from epmoe.core.placement import Placement, contiguous
from epmoe.core.shape import MoEShape
from epmoe.vllm_plugin import hook, layout, report
from epmoe.vllm_plugin.graphs_end import end_graphs_before
from epmoe.vllm_plugin.host import HostSpec, Shared, StagedExperts, placement_from_maps
from epmoe.vllm_plugin.share import Share, capacity_for
from epmoe.vllm_plugin.support import LayerParts, capture_sizes_over, reasons_against

_shared: "weakref.WeakKeyDictionary[Any, Shared]" = weakref.WeakKeyDictionary()


# --8<-- [start:weights]
class WeightsInPlace(UnquantizedFusedMoEMethod):
    """Leaves weights as vLLM loaded them, and says when they are there. vLLM's own method lays them out anew."""

    def __init__(self, moe: Any, loaded: Any):
        FusedMoEMethodBase.__init__(self, moe)
        self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.OOT, None
        self.supports_pre_processed_weights = False
        self._loaded = loaded

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        self._loaded(layer.w13_weight, layer.w2_weight)


# --8<-- [end:weights]


class StagedMoERunner(MoERunner):
    """Runs the routed experts on the stage that EPMOE_STAGE names."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        hook.refuse_other_environment()
        settings, config = hook.current(), get_current_vllm_config()
        self.staged: StagedExperts | None = None
        self.fallback_reasons = self._reasons(config, kwargs)
        if self.fallback_reasons:
            self._fall_back(settings)
        else:
            self.staged = StagedExperts(
                settings, self._host_spec(config), shared_by_layers(self.moe_config)
            )
            method = WeightsInPlace(self.moe_config, self.staged.place)
            self.routed_experts._replace_quant_method(method)
            # vLLM keeps compiled models on disk, found by a hash of the configuration alone; what is compiled around
            # a stage (no second sum over ranks) is not what fits around vLLM's own experts
            config.additional_config["epmoe"] = settings.stage
        self._forward_entry = self._select_forward()
        grid, group = self.moe_config.moe_parallel_config, get_tp_group()
        rank = (get_ep_group() if grid.use_ep else group).rank_in_group
        self._tell = partial(entry, self.layer_name, rank, self.staged, self.fallback_reasons)
        report.add(self, self._tell)
        if settings.report:
            report.keep_in(settings.report)

    # ---- what vLLM asks while it runs

    # --8<-- [start:seam]
    def _apply_quant_method(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        shared_experts_input: Tensor | None,
        input_ids: Tensor | None = None,
        shared_experts_overlapping: bool = False,
        **more: Any,
    ) -> tuple[Tensor | None, Any]:
        """Shared experts as vLLM runs them, its router's choice, then the stage: (shared output, routed output)."""
        if self.staged is None:
            return super()._apply_quant_method(
                hidden_states,
                router_logits,
                shared_experts_input,
                input_ids,
                shared_experts_overlapping,
                **more,
            )
        self._maybe_apply_shared_experts(shared_experts_input, SharedExpertsOrder.NO_OVERLAP)
        weights_TK, ids_TK = self.router.select_experts(
            hidden_states=hidden_states,
            router_logits=router_logits,
            topk_indices_dtype=None,
            input_ids=input_ids,
        )
        sizes, padding_T = self._step(len(hidden_states))
        self.staged.follow(self.routed_experts.w13_weight, self.routed_experts.w2_weight)
        y_TH = self.staged(hidden_states, ids_TK, weights_TK.float(), sizes, padding_T)
        report.tick(self.staged.settings.report, self.staged.calls)
        if shared_experts_overlapping:
            self._shared_experts.wait()
        return (self._shared_experts.output if self._shared_experts is not None else None), y_TH

    # --8<-- [end:seam]

    def _step(self, tokens: int) -> tuple[list[int] | None, Tensor | None]:
        """What vLLM knows of this step: tokens of every rank, and which rows of ours are padding."""
        context = get_forward_context()
        metadata, padding = context.dp_metadata, getattr(context, "is_padding", None)
        sizes = None if metadata is None else [int(n) for n in metadata.local_sizes]
        if not getattr(envs, "VLLM_MOE_SKIP_PADDING", True):
            padding = None  # vLLM hands the mask over all the same, and no longer fills it
        fits = padding is not None and len(padding) == tokens  # not where sequence parallelism cut
        return sizes, padding if fits and not self.moe_config.is_sequence_parallel else None

    @property
    def do_naive_dispatch_combine(self) -> bool:
        """Whether vLLM gathers tokens around us: the stage exchanges by itself."""
        return super().do_naive_dispatch_combine if self.staged is None else False

    # --8<-- [start:reduced]
    @property
    def _fused_output_is_reduced(self) -> bool:
        """Whether sums are complete: with experts spread over ranks yes; with experts cut by tensor parallelism no."""
        if self.staged is None:
            return super()._fused_output_is_reduced
        return self.moe_config.moe_parallel_config.use_ep

    # --8<-- [end:reduced]

    def _select_forward(self) -> Any:
        """An opaque operator on every platform: a compiler must not look into an exchange."""
        if getattr(self, "staged", None) is None or current_platform.is_tpu():
            return super()._select_forward()
        ops = torch.ops.vllm
        return ops.moe_forward if self._shared_experts is None else ops.moe_forward_shared

    # ---- set-up

    def _reasons(self, config: Any, extras: dict[str, Any]) -> list[str]:
        stage = registry.load(hook.current().stage)
        device, on_gpu = device_of(self.moe_config), current_platform.is_cuda()
        ranks = self.moe_config.moe_parallel_config.ep_size
        parts = LayerParts(
            moe=self.moe_config,
            experts=self.routed_experts,
            router=self.router,
            config=config,
            extras={
                "enable_dbo": self.enable_dbo,
                "routed_input_transform": self.routed_input_transform,
                "routed_output_transform": self.routed_output_transform,
            },
            device_type=device.type,
            arch=torch.cuda.get_device_capability(device) if on_gpu else None,
            transport="single" if ranks == 1 else "nccl" if on_gpu else "gloo",
        )
        reasons = reasons_against(parts, stage.capabilities)
        reasons += layout.reasons_against_order(self.routed_experts)
        if not isinstance(config.additional_config, dict):
            kind = type(config.additional_config).__name__
            reasons.append(
                f"additional_config is a {kind}: the stage's name cannot join the key of compiled models"
            )
        capacity = self._capacity()
        over = capture_sizes_over(capacity, self._share(), config, device.type)
        if over is not None:
            reasons.append(
                f"EPMOE_CAPACITY={capacity} is below the largest captured batch of {over} tokens: raise it"
            )
        return reasons

    def _fall_back(self, settings: Any) -> None:
        why = "; ".join(self.fallback_reasons)
        if not settings.fallback:
            raise UnsupportedError(
                f"{settings.stage} cannot run {self.layer_name}: {why}. "
                "Set EPMOE_FALLBACK=native to let vLLM run such layers itself"
            )
        hook.log.warning("%s runs natively, not on %s: %s", self.layer_name, settings.stage, why)

    def _capacity(self) -> int:
        """C: EPMOE_CAPACITY, or what vLLM's configuration asks for; the same on all ranks."""
        moe = self.moe_config
        return hook.current().capacity or capacity_for(
            moe.max_num_tokens, moe.max_capture_size or 0, self._share()
        )

    def _share(self) -> Share:
        grid, tp = self.moe_config.moe_parallel_config, get_tp_group()
        if not grid.use_ep or grid.is_sequence_parallel:
            return Share()
        return Share(tp.rank_in_group, tp.world_size)

    def _host_spec(self, config: Any) -> HostSpec:
        moe = self.moe_config
        return HostSpec(
            name=self.layer_name,
            shape=MoEShape(
                name=f"vllm:{self.layer_name}",
                hidden=moe.hidden_dim,
                intermediate=moe.intermediate_size_per_partition,
                experts=moe.num_experts,
                topk=moe.experts_per_token,
            ),
            placement=placement_of(self.routed_experts.expert_map_manager, moe),
            capacity=self._capacity(),
            share=self._share(),
            gather=lambda y_tH: get_tp_group().all_gather(y_tH, dim=0),
        )

    def epmoe_report(self) -> dict[str, Any]:
        """This layer's entry of the report."""
        return self._tell()


def entry(name: str, rank: int, staged: StagedExperts | None, why: list[str]) -> dict[str, Any]:
    """A layer's entry of the report, as long as anybody holds its experts."""
    if staged is None:
        return {"layer": name, "stage": "native", "why": why, "rank": rank}
    return {**staged.describe(), "rank": rank}


def device_of(moe: Any) -> torch.device:
    """Where the layer runs, with its index."""
    device = torch.device(moe.device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


def placement_of(manager: Any, moe: Any) -> Placement:
    """Which rank owns which expert, from vLLM's own function for the map of every rank."""
    ranks = moe.moe_parallel_config.ep_size
    if ranks == 1:
        return contiguous(moe.num_experts, 1)
    maps = [
        determine_expert_map(ranks, rank, moe.num_experts, manager.placement_strategy)[1].tolist()
        for rank in range(ranks)
    ]
    mine = manager.expert_map.tolist()
    if mine != maps[moe.moe_parallel_config.ep_rank]:
        raise UnsupportedError(
            f"vLLM's expert map {mine} is not the one that its placement strategy gives"
        )
    return placement_from_maps(maps, moe.num_experts)


def shared_by_layers(moe: Any) -> Shared:
    """The group and the buffers of this model; vLLM owns the process groups and will destroy them."""
    coordinator, device = (
        get_ep_group() if moe.moe_parallel_config.use_ep else get_tp_group(),
        device_of(moe),
    )
    if coordinator not in _shared:
        if moe.moe_parallel_config.ep_size == 1:
            group = groups.single(device)
        else:
            group = groups.join(
                coordinator.device_group, device, control_group=coordinator.cpu_group
            )
            for ended in (get_tp_group(), coordinator):  # in vLLM's order
                end_graphs_before(ended)
        _shared[coordinator] = Shared(group)
    return _shared[coordinator]
