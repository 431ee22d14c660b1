"""What makes training the tiny model fast and its routing real: experts, optimiser, balancing.

* `all_experts`: every expert runs on every token and the unselected ones get weight zero. For experts
  this small that is three dense matrix products and no sorting, so it beats grouped products, and the
  result is the same sum.
* `Muon` (Jordan et al., with the update scale of Moonlight): orthogonalised momentum for matrices,
  AdamW for the rest.
* `balance_`: DeepSeek-V3's auxiliary-loss-free balancing, the sign step on the router's correction
  bias, but only for experts outside a band of loads. Inside it routing stays as uneven as the text is.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Glm4MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

ALL_EXPERTS = "epmoe_all_experts"
LOAD_BAND = (0.4, 2.5)  # loads, in units of the mean load, that balancing leaves alone
BIAS_STEP = 1e-3


def all_experts(
    self: nn.Module, x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor
) -> torch.Tensor:
    """Experts forward with the signature that transformers' experts interface asks for."""
    E, I2, H = self.gate_up_proj.shape
    chosen_TKE = topk_ids_TK[..., None] == torch.arange(E, device=x_TH.device)
    weights_TE = (chosen_TKE * topk_weights_TK[..., None]).sum(1)
    if hasattr(self, "load_E"):
        self.load_E += chosen_TKE.sum((0, 1))
    gate_up_TE2I = F.linear(x_TH, self.gate_up_proj.view(E * I2, H)).view(-1, E, I2)
    gate_TEI, up_TEI = gate_up_TE2I.chunk(2, dim=-1)
    h_TEI = F.silu(gate_TEI) * up_TEI * weights_TE[..., None].to(up_TEI.dtype)
    return F.linear(h_TEI.flatten(1), self.down_proj.transpose(0, 1).reshape(H, -1))


ALL_EXPERTS_FUNCTIONS.register(ALL_EXPERTS, all_experts)


def moe_blocks(model: Glm4MoeForCausalLM) -> list[nn.Module]:
    """The MoE blocks (gate, experts, shared_experts) of the model, in layer order."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def prepare(model: Glm4MoeForCausalLM) -> None:
    """Switch `model` to the fast experts, count loads, and keep its routers in float32."""
    model.config._experts_implementation = ALL_EXPERTS
    for block in moe_blocks(model):
        counts = torch.zeros(block.gate.num_experts, dtype=torch.int64, device=model.device)
        block.experts.register_buffer("load_E", counts, persistent=False)
        block.gate.forward = _without_autocast(block.gate.forward)


def _without_autocast(forward: Callable) -> Callable:
    """A bf16 router would train on other choices than the exported float32 one makes."""

    def run(x: torch.Tensor):
        with torch.autocast(x.device.type, enabled=False):
            return forward(x.float())

    return run


def make_loss(
    model: Glm4MoeForCausalLM, length: int, dropout: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function ids [B, length+1] -> mean cross entropy in nats; the model's own layers, in order.

    In training mode what a layer adds to the stream is dropped out: the text is read many times over.
    """
    body = model.model
    positions = torch.arange(length, device=model.device)[None]
    with torch.no_grad():
        probe = torch.zeros(1, length, body.config.hidden_size, device=model.device)
        rotation = body.rotary_emb(probe, positions)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        x = F.dropout(body.embed_tokens(ids[:, :-1]), dropout, model.training)
        for layer in body.layers:
            y = layer(x, position_embeddings=rotation, attention_mask=None, position_ids=positions)
            x = x + F.dropout(y - x, dropout, model.training)
        logits = model.lm_head(body.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return loss


@torch.no_grad()
def balance_(model: Glm4MoeForCausalLM) -> None:
    """Nudge the correction bias of experts whose load since the last call left LOAD_BAND."""
    for block in moe_blocks(model):
        load_E = block.experts.load_E
        share_E = load_E / load_E.float().mean().clamp(min=1.0)
        step_E = (share_E < LOAD_BAND[0]).float() - (share_E > LOAD_BAND[1]).float()
        block.gate.e_score_correction_bias.add_(step_E, alpha=BIAS_STEP)
        load_E.zero_()


@torch.no_grad()
def orthogonalise(update_BRC: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz steps towards U V^T for each matrix [R, C], R <= C, of a batch."""
    x = update_BRC / (update_BRC.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon:
    """Muon for a list of 2-D or 3-D (batch of matrices) parameters; equal shapes run as one batch."""

    def __init__(self, params: Iterable[nn.Parameter], decay: float, momentum: float = 0.95):
        self.params = list(params)
        self.decay, self.momentum = decay, momentum
        self.velocity = [torch.zeros_like(p) for p in self.params]
        self.dtype = torch.bfloat16 if self.params[0].is_cuda else torch.float32
        self.groups: dict[tuple[int, int], list[int]] = {}
        for index, p in enumerate(self.params):
            self.groups.setdefault(tuple(sorted(p.shape[-2:])), []).append(index)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        grads = [p.grad for p in self.params]
        torch._foreach_lerp_(self.velocity, grads, 1 - self.momentum)
        torch._foreach_mul_(self.params, 1 - lr * self.decay)
        for (rows, columns), members in self.groups.items():
            looking_ahead = [grads[i].lerp(self.velocity[i], self.momentum) for i in members]
            wide = [self._wide(u) for u in looking_ahead]
            flat = orthogonalise(torch.cat(wide).to(self.dtype))
            parts = flat.split([len(w) for w in wide])
            scale = -lr * 0.2 * math.sqrt(max(rows, columns))
            for i, part in zip(members, parts, strict=True):
                p = self.params[i]
                tall = p.shape[-2] > p.shape[-1]
                p.add_((part.mT if tall else part).reshape(p.shape).to(p.dtype), alpha=scale)

    @staticmethod
    def _wide(update: torch.Tensor) -> torch.Tensor:
        batch = update if update.ndim == 3 else update[None]
        return batch.mT if batch.shape[-2] > batch.shape[-1] else batch


class Optimiser:
    """Muon for the matrices inside the layers, AdamW for embeddings, routers and norms."""

    def __init__(self, model: Glm4MoeForCausalLM, lr: float, decay: float):
        self.lr = lr
        matrices, tables, scales = [], [], []
        for name, p in model.named_parameters():
            if p.ndim == 1:
                scales.append(p)
            elif ".layers." in name and not name.endswith("gate.weight"):
                matrices.append(p)
            else:
                tables.append(p)
        groups = [
            {"params": tables, "weight_decay": decay},
            {"params": scales, "weight_decay": 0.0},
        ]
        self.muon = Muon(matrices, decay)
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=matrices[0].is_cuda)

    def step(self, factor: float) -> None:
        """One update at `factor` times the peak learning rate; clears the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor
        self.adam.step()
        self.muon.step(self.lr * factor)
        self.adam.zero_grad(set_to_none=True)
        for p in self.muon.params:
            p.grad = None
