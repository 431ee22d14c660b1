"""What the trained model does: loss, how uneven its routing is, what it writes; and the model card.

Everything is measured on the exported files, loaded by the stock transformers classes.
"""

import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tiny_data import KINDS, Corpus
from tiny_training import ALL_EXPERTS
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "def read_lines(path, encoding=None):\n"


@dataclass
class Routing:
    """Routing of one MoE layer over a text: ids [T, K] and float32 weights [T, K]."""

    layer: int
    topk_ids_TK: np.ndarray
    topk_weights_TK: np.ndarray


def record_routing(model: nn.Module, windows_BL: torch.Tensor, batch: int) -> tuple[float, list]:
    """Mean next-token loss (nats) over windows [B, L+1], and the Routing of every MoE layer."""
    layers = {
        i: layer.mlp.gate
        for i, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    }
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {i: [] for i in layers}

    def hook(i: int):
        return lambda module, inputs, out: seen[i].append((out[2].cpu(), out[1].float().cpu()))

    handles = [gate.register_forward_hook(hook(i)) for i, gate in layers.items()]
    total, tokens = 0.0, 0
    with torch.no_grad():
        for part in windows_BL.split(batch):
            logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
            total += F.cross_entropy(
                logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
            ).item()
            tokens += part[:, 1:].numel()
    for handle in handles:
        handle.remove()
    routings = [
        Routing(i, torch.cat([a for a, _ in s]).numpy(), torch.cat([b for _, b in s]).numpy())
        for i, s in seen.items()
    ]
    return total / tokens, routings


def unevenness(topk_ids_TK: np.ndarray, experts: int) -> dict[str, float]:
    """How far expert loads are from equal: max/mean, min/mean, entropy over ln(E), largest share."""
    load = np.bincount(topk_ids_TK.ravel(), minlength=experts).astype(float)
    share = load / load.sum()
    entropy = -(share[share > 0] * np.log(share[share > 0])).sum()
    return {
        "max_over_mean": load.max() / load.mean(),
        "min_over_mean": load.min() / load.mean(),
        "entropy": entropy / math.log(experts),
        "top_share": share.max(),
        "top_expert": int(load.argmax()),
    }


def describe_layer(routing: Routing, kinds_T: np.ndarray, experts: int) -> dict[str, Any]:
    """Unevenness of one layer, over all tokens and by kind of token."""
    ids, weights = routing.topk_ids_TK, routing.topk_weights_TK
    share = weights / weights.sum(1, keepdims=True)
    by_kind = {
        kind: unevenness(ids[kinds_T == k], experts) | {"tokens": int((kinds_T == k).sum())}
        for k, kind in enumerate(KINDS)
        if (kinds_T == k).any()
    }
    return {
        "layer": routing.layer,
        "largest_weight_share": float(share.max(1).mean()),
        "kind_information_bits": _mutual_information(ids, kinds_T, experts),
        **unevenness(ids, experts),
        "by_kind": by_kind,
    }


def _mutual_information(topk_ids_TK: np.ndarray, kinds_T: np.ndarray, experts: int) -> float:
    """Bits that knowing the expert tells about the kind of token: 0 if experts do not specialise."""
    joint = np.zeros((len(KINDS), experts))
    np.add.at(joint, (np.repeat(kinds_T, topk_ids_TK.shape[1]), topk_ids_TK.ravel()), 1)
    joint /= joint.sum()
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    seen = joint > 0
    return float((joint[seen] * np.log2(joint[seen] / independent[seen])).sum())


def windows(ids: np.ndarray, length: int, limit: int) -> np.ndarray:
    """Cut ids into at most `limit` windows [B, length+1] that overlap by the one token to predict."""
    count = min(limit, (len(ids) - 1) // length)
    return np.stack([ids[i * length : (i + 1) * length + 1] for i in range(count)])


def evaluate(out: Path, corpus: Corpus, device: str, length: int, limit: int) -> dict[str, Any]:
    """Load the exported checkpoint and measure it on held-out text (at most `limit` windows)."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(device).eval()
    ids = windows(corpus.held_out, length, limit)
    kinds_T = windows(corpus.held_out_kinds, length, limit)[:, :-1].ravel()
    ids_BL = torch.from_numpy(ids).long().to(device)
    loss, routings = record_routing(model, ids_BL, batch=16)
    E = model.config.n_routed_experts
    return {
        "held_out_bits_per_byte": loss / math.log(2),
        "held_out_tokens": int(ids_BL[:, 1:].numel()),
        "layers": [describe_layer(r, kinds_T, E) for r in routings],
        "samples": samples(model, out, device, tokens=min(600, length)),
        "fast_against_stock": compare_experts(model, ids_BL[:8, :-1]),
    }


def compare_experts(model: nn.Module, ids_BL: torch.Tensor) -> dict[str, float]:
    """Logits of the stock experts against those of the experts used in training (float32, CPU).

    Sums in another order can make a near tie between two experts fall the other way. From there on
    the two runs compute different things, so a window counts up to its first such token.
    """
    used, model, ids_BL = model.config._experts_implementation, model.cpu(), ids_BL.cpu()
    stock, stock_choice = _logits_and_choices(model, "eager", ids_BL)
    fast, fast_choice = _logits_and_choices(model, ALL_EXPERTS, ids_BL)
    model.config._experts_implementation = used
    other_BL = (stock_choice != fast_choice).flatten(2).any(2)
    same_BL = other_BL.cumsum(1) == 0
    difference = (stock - fast).abs()[same_BL]
    return {
        "max": difference.max().item(),
        "mean": difference.mean().item(),
        "tokens": int(same_BL.sum()),
        "near_ties": int((other_BL.cumsum(1) == 1).logical_and(other_BL).sum()),
    }


@torch.no_grad()
def _logits_and_choices(
    model: nn.Module, experts: str, ids_BL: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, L, V] and the chosen experts [B, L, layers, K], sorted by id."""
    model.config._experts_implementation = experts
    chosen: list[torch.Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    handles = [
        gate.register_forward_hook(lambda module, inputs, out: chosen.append(out[2]))
        for gate in gates
    ]
    logits = model(input_ids=ids_BL, use_cache=False).logits
    for handle in handles:
        handle.remove()
    by_layer = [ids.sort(1).values.view(*ids_BL.shape, -1) for ids in chosen]
    return logits, torch.stack(by_layer, dim=2)


def samples(model: nn.Module, out: Path, device: str, tokens: int) -> dict[str, str]:
    """Text after PROMPT, greedy and sampled (temperature 0.6, seed 0)."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False).to(device)
    torch.manual_seed(0)
    plain = model.generate(**inputs, max_new_tokens=tokens // 3, do_sample=False)
    drawn = model.generate(**inputs, max_new_tokens=tokens, do_sample=True, temperature=0.6)
    return {
        "greedy": tokenizer.decode(plain[0], skip_special_tokens=True),
        "sampled": tokenizer.decode(drawn[0], skip_special_tokens=True),
    }


def machine(device: str) -> dict[str, str]:
    """What the numbers were taken on."""
    import transformers

    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
