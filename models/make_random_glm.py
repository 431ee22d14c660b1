"""A GLM-4-MoE checkpoint of any size with random weights, for measuring a model end to end at sizes that count.

    python models/make_random_glm.py --shape glm-5.3-flash --layers 2 --out /tmp/random-glm       29 GB
    epmoe vllm compare --model /tmp/random-glm --device cuda --compiled ...

One dense layer, then MoE layers of the named shape; tokenizer and vocabulary are those of tiny-glm-moe. Every matrix is
drawn with variance 1 / fan-in, so that activations keep their size and experts differ; the text that comes out means
nothing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from tiny_model import make_config, make_tokenizer, unpacked
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from epmoe.core.shape import MoEShape, named_shape

HEAD_DIM = 128
SHARD_BYTES = 4 * 2**30


def config_of(shape: MoEShape, layers: int) -> Glm4MoeConfig:
    """tiny-glm-moe's configuration with the sizes of `shape` and `layers` MoE layers behind one dense layer."""
    config, head_dim = make_config(), min(HEAD_DIM, shape.hidden // 4)
    changed = {
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "num_hidden_layers": 1 + layers,
        "head_dim": head_dim,
        "num_attention_heads": shape.hidden // head_dim,
        "num_key_value_heads": max(1, shape.hidden // head_dim // 8),
        "n_routed_experts": shape.experts,
        "num_experts_per_tok": shape.topk,
        "routed_scaling_factor": shape.router.scale,
        "dtype": "bfloat16",
    }
    for name, value in changed.items():
        setattr(config, name, value)
    return config


def random_tensors(
    config: Glm4MoeConfig, seed: int, device: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by its published name, drawn one after the other: bf16, the correction bias float32."""
    with torch.device("meta"):
        model = Glm4MoeForCausalLM(config)
    generator = torch.Generator(device).manual_seed(seed)
    for packed_name, packed in model.state_dict().items():
        for name, like in unpacked(packed_name, packed):
            yield name, _draw(name, like.shape, generator)


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(shape)
    if len(shape) == 1:  # the weights of norms
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
    scale = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
    return (drawn * scale).cpu()


def write(out: Path, shape: MoEShape, layers: int, seed: int, device: str) -> int:
    """Write config, tokenizer and sharded weights to the folder `out`; returns the bytes of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    config = config_of(shape, layers)
    config.save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    places: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(random_tensors(config, seed, device))):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return total


def _shards(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in tensors:
        shard[name] = tensor
        held += tensor.nbytes
        if held >= SHARD_BYTES:
            yield shard
            shard, held = {}, 0
    if shard:
        yield shard


def main(
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    shape: Annotated[str, typer.Option(help="A named shape.")] = "glm-5.3-flash",
    layers: Annotated[int, typer.Option(min=1, help="MoE layers.")] = 2,
    seed: Annotated[int, typer.Option(help="Of all weights.")] = 0,
    device: Annotated[str, typer.Option(help="Where to draw: cpu or cuda.")] = "cpu",
) -> None:
    """Write a checkpoint of random weights."""
    written = write(out, named_shape(shape), layers, seed, device)
    print(f"{out}: {shape}, {layers} MoE layers, {written / 1e9:.1f} GB")


if __name__ == "__main__":
    typer.run(main)
