"""Train models/tiny-glm-moe: a small real GLM-4-MoE, on the Python standard library's source.

    python models/train_tiny_glm_moe.py                    about two minutes on one GPU
    python models/train_tiny_glm_moe.py --smoke --out DIR  three steps on the CPU, in seconds

The files beside this one hold the parts: tiny_data (text), tiny_model (config, tokenizer, export),
tiny_training (fast experts, optimiser, balancing), tiny_report and tiny_card (what came out).
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tiny_card import write_card
from tiny_data import HELD_OUT_ONE_IN, VOCAB_SIZE, Corpus, build_corpus
from tiny_model import make_config, save_checkpoint
from tiny_report import evaluate, machine, windows
from tiny_training import BIAS_STEP, LOAD_BAND, Optimiser, balance_, make_loss, moe_blocks, prepare
from transformers import Glm4MoeForCausalLM

WARM_UP_STEPS = 100
TIMED_FROM, TIMED_TO = 30, 90  # steps whose speed decides how many fit into --minutes


@dataclass(frozen=True)
class Settings:
    """All that decides a run, but for the text and the machine."""

    device: str
    minutes: float | None
    steps: int | None
    batch: int
    length: int
    lr: float
    decay: float
    dropout: float
    seed: int
    compiled: bool


class Trainer:
    """Model, optimiser and data of one run."""

    def __init__(self, settings: Settings, corpus: Corpus):
        torch.manual_seed(settings.seed)
        self.settings, self.corpus = settings, corpus
        self.model = Glm4MoeForCausalLM(make_config()).to(settings.device).train()
        prepare(self.model)
        self.optimiser = Optimiser(self.model, settings.lr, settings.decay)
        self.eager_loss = make_loss(self.model, settings.length, settings.dropout)
        self.loss = torch.compile(self.eager_loss) if settings.compiled else self.eager_loss
        self.text = torch.from_numpy(corpus.train).to(settings.device)
        self.generator = torch.Generator(settings.device).manual_seed(settings.seed)
        self.curve: list[tuple[int, float]] = []

    def batch(self) -> torch.Tensor:
        """Windows [batch, length+1] from random places of the text."""
        s = self.settings
        last = len(self.text) - s.length - 1
        starts = torch.randint(
            last, (s.batch, 1), generator=self.generator, device=self.text.device
        )
        return self.text[starts + torch.arange(s.length + 1, device=starts.device)].long()

    def autocast(self) -> torch.autocast:
        kind = torch.device(self.settings.device).type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda")

    def step(self, factor: float) -> torch.Tensor:
        with self.autocast():
            loss = self.loss(self.batch())
        loss.backward()
        self.optimiser.step(factor)
        balance_(self.model)
        return loss.detach()

    @torch.no_grad()
    def held_out_bits(self, limit: int) -> float:
        """Bits per byte on the first `limit` held-out windows, in the arithmetic of training."""
        s = self.settings
        ids = torch.from_numpy(windows(self.corpus.held_out, s.length, limit)).long()
        losses, sizes = [], []
        self.model.eval()
        for part in ids.to(s.device).split(s.batch):
            with self.autocast():
                losses.append(self.eager_loss(part).item())
            sizes.append(len(part))
        self.model.train()
        for block in moe_blocks(self.model):  # held-out loads must not move the balance
            block.experts.load_E.zero_()
        return float(np.average(losses, weights=sizes)) / math.log(2)

    def run(self) -> tuple[int, float]:
        """Train to the end of the schedule; returns (steps, seconds)."""
        total, began, mark, step = self.settings.steps, time.monotonic(), 0.0, 0
        while total is None or step < total:
            loss = self.step(schedule(step, total))
            step += 1
            if total is None and step in (TIMED_FROM, TIMED_TO):
                loss.item()  # waits for the device, so that the clock tells of finished steps
                now = time.monotonic() - began
                total = None if step == TIMED_FROM else self.steps_that_fit(now, now - mark)
                mark = now
            if total is not None and self.is_notable(step, total):
                self.note(step, loss.item(), time.monotonic() - began)
        return step, time.monotonic() - began

    def steps_that_fit(self, used: float, timed: float) -> int:
        """All steps of the run, after `used` seconds of it, of which `timed` were the timed steps."""
        each = timed / (TIMED_TO - TIMED_FROM)
        left = (self.settings.minutes or 0.0) * 60 - used
        total = TIMED_TO + max(1, int(left / each))
        typer.echo(f"{each * 1e3:.1f} ms a step, so {total} steps fit")
        return total

    @staticmethod
    def is_notable(step: int, total: int) -> bool:
        """True about twelve times in a run, the last step included."""
        every = max(1, total // 12)
        return step == total or (step % every == 0 and total - step >= every / 2)

    def note(self, step: int, loss: float, seconds: float) -> None:
        bits = self.held_out_bits(limit=96)
        self.curve.append((step, bits))
        trained = loss / math.log(2)
        typer.echo(f"step {step}: train {trained:.3f}, held out {bits:.3f} bits, {seconds:.0f} s")


def schedule(step: int, total: int | None) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine that ends at zero."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    if total is None or step < WARM_UP_STEPS:
        return warm
    done = (step - WARM_UP_STEPS) / max(1, total - WARM_UP_STEPS)
    return warm * 0.5 * (1 + math.cos(math.pi * done))


def describe(trainer: Trainer, steps: int, seconds: float, measured: dict[str, Any]) -> dict:
    """Everything the model card says, as one JSON-able dictionary."""
    s, config, corpus = trainer.settings, trainer.model.config, trainer.corpus
    count = sum(p.numel() for p in trainer.model.parameters())
    idle = config.n_routed_experts - config.num_experts_per_tok
    moe_layers = config.num_hidden_layers - config.first_k_dense_replace
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    bits = measured.pop("held_out_bits_per_byte")
    model = {
        "layers": config.num_hidden_layers,
        "moe_layers": moe_layers,
        "experts": config.n_routed_experts,
        "k": config.num_experts_per_tok,
        "scaling": config.routed_scaling_factor,
        "hidden": config.hidden_size,
        "intermediate": config.moe_intermediate_size,
        "parameters": count,
        "active": count - idle * expert * moe_layers,
    }
    training = {
        "files": corpus.files,
        "train_tokens": len(corpus.train),
        "one_in": HELD_OUT_ONE_IN,
        "digest": corpus.digest,
        "held_out_tokens": measured.pop("held_out_tokens"),
        "bits": bits,
        "uniform": math.log2(VOCAB_SIZE),
        "steps": steps,
        "batch": s.batch,
        "length": s.length,
        "seen": steps * s.batch * s.length,
        "seconds": seconds,
        "lr": s.lr,
        "decay": s.decay,
        "dropout": s.dropout,
        "seed": s.seed,
        "bias_step": BIAS_STEP,
        "band_low": LOAD_BAND[0],
        "band_high": LOAD_BAND[1],
        "difference": measured["fast_against_stock"]["max"],
        "compared": measured["fast_against_stock"]["tokens"],
        "curve": ", ".join(f"{bits:.2f} ({step:,})" for step, bits in trainer.curve),
    }
    return {"model": model, "training": training, "machine": machine(s.device), **measured}


def main(
    out: Annotated[Path, typer.Option(help="folder to write")] = Path(__file__).parent
    / "tiny-glm-moe",
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto")] = "auto",
    steps: Annotated[int, typer.Option(help="training steps")] = 3000,
    minutes: Annotated[
        float | None, typer.Option(help="train this long instead of --steps")
    ] = None,
    batch: Annotated[int, typer.Option(help="windows a step")] = 48,
    length: Annotated[int, typer.Option(help="tokens a window, at most 1024")] = 1024,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 3e-3,
    decay: Annotated[float, typer.Option(help="weight decay")] = 0.3,
    dropout: Annotated[float, typer.Option(help="of what each layer adds")] = 0.1,
    seed: int = 0,
    compiled: Annotated[bool, typer.Option(help="use torch.compile (on a GPU)")] = True,
    smoke: Annotated[bool, typer.Option(help="three tiny steps on the CPU")] = False,
) -> None:
    """Train, export in the published layout, measure the exported files, write the model card."""
    if smoke:
        device, minutes, steps, batch, length = "cpu", None, 3, 2, 128
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    compiled = compiled and device.startswith("cuda")
    settings = Settings(
        device=device,
        minutes=minutes,
        steps=steps if minutes is None else None,
        batch=batch,
        length=length,
        lr=lr,
        decay=decay,
        dropout=dropout,
        seed=seed,
        compiled=compiled,
    )
    corpus = build_corpus(max_bytes=200_000 if smoke else None)
    typer.echo(
        f"{corpus.files} files, {len(corpus.train):,} tokens, held out {len(corpus.held_out):,}"
    )
    trainer = Trainer(settings, corpus)
    done, seconds = trainer.run()
    save_checkpoint(trainer.model, out)
    measured = evaluate(out, corpus, device, length, limit=4 if smoke else 400)
    report = describe(trainer, done, seconds, measured)
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "README.md").write_text(write_card(report))
    typer.echo(f"held out: {report['training']['bits']:.3f} bits per byte; wrote {out}")


if __name__ == "__main__":
    typer.run(main)
