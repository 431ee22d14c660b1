"""The model card of the tiny checkpoint, written from the training report alone."""

# ruff: noqa: E501 - a row of a Markdown table is one line
from typing import Any

HEAD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [moe, expert-parallel, byte-level, python, tiny]
---
# tiny-glm-moe

A mixture-of-experts model small enough to commit, real enough to route like one. It is a
`Glm4MoeForCausalLM`: {layers} layers, the first dense, then {moe_layers} MoE layers of {experts} experts
(top-{k}, one shared expert, sigmoid router with a correction bias, weights normalised and scaled by
{scaling}); hidden {hidden}, expert intermediate {intermediate}, {parameters:,} parameters, of which
{active:,} work on each token. It reads and writes bytes.

**What it is for.** It gives expert-parallel layers real weights, real activations and a real, uneven
routing, on any machine and without a download. It writes text that looks like Python and means
nothing; it is no assistant and no code generator.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("models/tiny-glm-moe")
tokenizer = AutoTokenizer.from_pretrained("models/tiny-glm-moe")
ids = tokenizer("def main():\\n", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=200)[0]))
```
"""

TRAINING = """
## Training

| | |
|---|---|
| text | the standard library of Python {python}, {files} files, {train_tokens:,} tokens; one file in {one_in} held out by the hash of its path |
| held-out loss | **{bits:.3f} bits per byte** over {held_out_tokens:,} tokens (uniform over the vocabulary: {uniform:.2f}) |
| steps | {steps:,} of {batch} x {length} tokens ({seen:,} tokens), {seconds:.0f} s on one {device} |
| optimiser | Muon for the matrices inside layers, AdamW for the rest; peak {lr}, cosine to zero, decay {decay}, dropout {dropout} |
| balancing | no auxiliary loss: a sign step of {bias_step} on the correction bias, for experts whose load leaves {band_low} to {band_high} times the mean |
| stock experts against those used in training | largest difference of logits {difference:.1e} (float32, CPU, {compared:,} tokens) |
| versions | torch {torch}, transformers {transformers} |

Reproduce: `python models/train_tiny_glm_moe.py --steps {steps} --decay {decay} --dropout {dropout} --seed {seed}`
(a CUDA device).
The seed fixes data and initial weights; the text depends on the Python release (SHA-256 of
this one: `{digest}`)
and sums on a GPU vary in their last bits, so another run gives a model like this one, not the same bits.

Held-out bits per byte while training, on the first 96 windows (after so many steps): {curve}.
"""

ROUTING = """
## Routing on held-out text

A load is the number of tokens an expert gets; with {experts} experts and equal loads max / mean is 1,
entropy is 1 (in units of its largest value) and the top share {even:.1%}. *Sharpness* is the mean share of
a token's largest routing weight ({flat:.0%} if all {k} were equal). *Kind* is the information, in bits,
that an expert's identity gives about the kind of token.

| layer | max / mean | min / mean | entropy | top share | sharpness | kind |
|---:|---:|---:|---:|---:|---:|---:|
"""

KIND_ROW_INTRO = """
By kind of token, the largest load over the mean load and (in brackets) the busiest expert:

"""

LICENCE = """
## Licences

The text is CPython's standard library (Python Software Foundation License). The weights and this card:
Apache-2.0.
"""


def write_card(report: dict[str, Any]) -> str:
    """The whole card as Markdown; `report` is what train_tiny_glm_moe.py saves as training.json."""
    text = HEAD.format(**report["model"]) + TRAINING.format(
        **report["training"], **report["machine"]
    )
    parts = [text, _routing(report), _samples(report["samples"]), LICENCE]
    return "".join(parts)


def _routing(report: dict[str, Any]) -> str:
    experts, k = report["model"]["experts"], report["model"]["k"]
    text = ROUTING.format(experts=experts, k=k, even=1 / experts, flat=1 / k)
    for row in report["layers"]:
        text += (
            f"| {row['layer']} | {row['max_over_mean']:.2f} | {row['min_over_mean']:.2f} "
            f"| {row['entropy']:.3f} | {row['top_share']:.1%} | {row['largest_weight_share']:.0%} "
            f"| {row['kind_information_bits']:.2f} |\n"
        )
    return text + KIND_ROW_INTRO + _kinds(report["layers"])


def _kinds(layers: list[dict[str, Any]]) -> str:
    kinds = list(layers[0]["by_kind"])
    head = "| layer | " + " | ".join(kinds) + " |\n|---:|" + "---:|" * len(kinds) + "\n"
    rows = []
    for row in layers:
        cells = [row["by_kind"][kind] for kind in kinds]
        shown = " | ".join(f"{c['max_over_mean']:.1f} ({c['top_expert']})" for c in cells)
        rows.append(f"| {row['layer']} | {shown} |\n")
    return head + "".join(rows)


def _samples(samples: dict[str, str]) -> str:
    blocks = [
        f"\n{title}:\n\n````python\n{samples[key].rstrip()}\n````\n"
        for key, title in (("greedy", "Greedy"), ("sampled", "Temperature 0.6"))
    ]
    return "\n## What it writes\n" + "".join(blocks)
