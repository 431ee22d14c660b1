"""vLLM's fused experts as subjects: the opponent, at its defaults and tuned for this very shape.

What is called is `vllm.model_executor.layers.fused_moe.fused_experts` (0.32), the Triton path that vLLM takes for
bfloat16 experts, on the gathered rows of all ranks with an expert map for the local experts. With several ranks an
all-gather and a reduce-scatter go around it, as vLLM's AgRsAll2AllManager does; they are our own few lines over
torch.distributed (`peers.RankPeers`), because that manager cannot be made without a whole vLLM engine around it.

Tuning is a sweep over its Triton configurations, each timed in a CUDA graph on draws that are not reported. A file of
chosen configurations has vLLM's own format (rows -> configuration), so it also works with VLLM_TUNED_CONFIG_FOLDER.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epmoe.core.bench.subjects import GatheredSubject, Setting
from epmoe.core.errors import InputError, UnsupportedError
from epmoe.core.reading import write_whole

LOOPBACK_NAMES = ("vllm-default", "vllm-tuned")
RANK_NAMES = ("vllm-agrs", "vllm-agrs-tuned")
NAMES = (*LOOPBACK_NAMES, *RANK_NAMES)
TUNED = ("vllm-tuned", "vllm-agrs-tuned")
_SHARED_MEMORY = 227 * 1024

Config = dict[str, int]


def names_for(ranks_here: int) -> tuple[str, ...]:
    """The subjects that fit one process, or several."""
    return LOOPBACK_NAMES if ranks_here == 1 else RANK_NAMES


class VllmExperts(GatheredSubject):
    """vLLM's experts between a gather and a way home; `config` overrides its choice, None leaves it."""

    deterministic = True

    def __init__(self, setting: Setting, config: Config | None):
        super().__init__(setting)
        self._module = load(setting)
        self.config = config
        owners_E = setting.placement.owner_table(setting.device)
        slots_E = setting.placement.slot_table(setting.device)
        here_E = torch.where(owners_E == setting.rank, slots_E, -1).to(torch.int32)
        self.expert_map = here_E if setting.ranks > 1 else None

    def experts(self, layer: int, x_RH: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
        weights = self.setting.weights[layer]
        override = self._module.override_config if self.config else contextlib.nullcontext
        with override(self.config):
            return self._module.fused_experts(
                x_RH,
                weights.w13_E2IH,
                weights.w2_EHI,
                weights_RK,
                ids_RK,
                global_num_experts=self.setting.shape.experts,
                expert_map=self.expert_map,
            )

    def describe(self) -> dict[str, object]:
        config: Any = self.config or self._chosen_by_vllm()
        return {**super().describe(), "experts": "vllm fused_experts", "config": config}

    def _chosen_by_vllm(self) -> object:
        try:
            from vllm.model_executor.layers.fused_moe.fused_moe import (  # pyright: ignore
                try_get_optimal_moe_config,
            )

            weights, rows = self.setting.weights[0], self.setting.ranks * self.setting.tokens
            shapes = (weights.w13_E2IH.shape, weights.w2_EHI.shape)
            return try_get_optimal_moe_config(*shapes, self.setting.shape.topk, None, rows)
        except Exception as error:  # for the record only; the measurement does not depend on it
            return f"could not be asked: {error!r}"


def load(setting: Setting) -> Any:
    """vLLM's fused_moe package. Raises UnsupportedError with the exact reason where it cannot be used."""
    if setting.device.type != "cuda":
        raise UnsupportedError("vLLM's Triton experts need a CUDA device")
    try:
        from vllm.model_executor.layers import fused_moe  # pyright: ignore

        missing = [n for n in ("fused_experts", "override_config") if not hasattr(fused_moe, n)]
    except Exception as error:  # its import runs half of vLLM: whatever fails there is the reason
        raise UnsupportedError(f"vLLM cannot be imported: {error!r}") from error
    if missing:
        raise UnsupportedError(f"this vLLM's fused_moe has no {', '.join(missing)}: use vLLM 0.32")
    return fused_moe


def make(name: str, setting: Setting, configs: dict[int, Config] | None) -> VllmExperts:
    """The subject of that name."""
    if setting.group.size > 1 and name in LOOPBACK_NAMES:
        raise UnsupportedError(f"{name} is for one process: with several ranks use vllm-agrs")
    if setting.group.size == 1 and name in RANK_NAMES:
        raise UnsupportedError(f"{name} needs several ranks: on one use vllm-default")
    if name not in TUNED:
        return VllmExperts(setting, None)
    rows = setting.ranks * setting.tokens
    if not configs:
        load(setting)  # where vLLM cannot run at all, that is why nothing is tuned
        raise UnsupportedError(
            f"{name}: no tuned configuration, no file is named and the sweep is off or found none that runs"
        )
    return VllmExperts(setting, configs[min(configs, key=lambda known: abs(known - rows))])


def read_configs(path: Path) -> dict[int, Config]:
    """A file in vLLM's format. Raises InputError where it is none."""
    try:
        data = json.loads(path.read_text())
        return {int(rows): dict(config) for rows, config in data.items() if rows.isdigit()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no vLLM configuration file: {error}") from error


def write_configs(path: Path, configs: dict[int, Config]) -> None:
    """The format of vLLM's configs folder: rows -> configuration, with the Triton version."""
    import triton

    data: dict[str, Any] = {"triton_version": triton.__version__}
    data |= {str(rows): configs[rows] for rows in sorted(configs)}
    write_whole(path, json.dumps(data, indent=2) + "\n")


def candidates(rows: int, limit: int) -> list[Config]:
    """At most `limit` configurations for `rows` gathered rows, the likely ones first; all of them fit a Hopper SM."""
    if rows <= 128:
        grid = [
            (16, n, k, 1, s, 4)
            for s in (4, 3, 5)
            for n, k in ((64, 128), (32, 128), (128, 128), (32, 256), (64, 256), (128, 64))
        ]
    elif rows <= 2048:
        grid = [
            (m, n, k, 1, s, w)
            for s in (3, 4)
            for m, w in ((32, 8), (16, 4), (32, 4), (64, 8), (64, 4))
            for n, k in ((128, 128), (128, 64), (64, 128))
        ]
    else:
        grid = [
            (m, n, 64, g, s, 8)
            for s in (4, 3)
            for m, n in ((128, 256), (128, 128), (64, 256), (64, 128))
            for g in (16, 1)
        ]
    fitting = [c for c in grid if c[4] * (c[0] + c[1]) * c[2] * 2 <= _SHARED_MEMORY]
    return [_named(c) for c in fitting[:limit]]


def _named(values: Sequence[int]) -> Config:
    m, n, k, group, stages, warps = values
    return {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": k,
        "GROUP_SIZE_M": group,
        "SPLIT_K": 1,
        "num_warps": warps,
        "num_stages": stages,
    }


def sweep(
    setting: Setting, limit: int, time_chain: Callable[[VllmExperts], float]
) -> tuple[Config, dict[str, float]]:
    """The fastest configuration on the setting's draws (tuning draws), and microseconds of every candidate.

    Args:
        setting: with draws that are not reported.
        limit: how many candidates.
        time_chain: microseconds per layer of a subject on this rank.

    With several ranks the slowest one's time is a candidate's score, so all ranks choose the same one. Collective.
    """
    scores: dict[str, float] = {}
    problem = ""
    tried = candidates(setting.ranks * setting.tokens, limit)
    for config in tried:
        mine = float("inf")
        try:
            mine = time_chain(VllmExperts(setting, config))
        except (
            Exception
        ) as error:  # a configuration that does not compile loses; it does not end the run
            problem = repr(error)
        everyone = setting.group.all_gather_objects((mine, problem))
        scores[json.dumps(config)] = max(time for time, _ in everyone)
    best = min(tried, key=lambda config: scores[json.dumps(config)])
    if scores[json.dumps(best)] == float("inf"):
        raise UnsupportedError(f"none of {len(tried)} vLLM configurations ran; the last: {problem}")
    return best, scores
