# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Inside vLLM
#
# !!! abstract "This page"
#     **Time** 20 minutes to read, seconds to run. **Hardware** any CPU; the comparison at the end was made beforehand,
#     since vLLM needs an environment of its own. **Before this** [fused Triton](../03_fused_triton/walkthrough.md).
#
#     **Files**: `epmoe/vllm_plugin/runner.py` and `host.py`.
#
#     **Afterwards you can** name what a serving framework asks of a layer, put any layer in its place without changing
#     the framework, and say what it proves when a model writes the same text, and what it does not.
#
#     **One number** The experts of a real model run on a stage with **five** overrides in one class.

# %% [markdown]
# ## The problem
#
# So far a test called the layer. It was polite: tokens arrived in the right dtype, on all ranks at the same time, with
# weights in the order that we wrote down ourselves. A server is not polite. One rank has thirty requests and the other
# none; batches are padded to a size that was captured before; weights have been loaded by somebody else and laid out
# for somebody else's kernels; a compiler wants to look inside. And whether the layer runs at all cannot be seen: the
# server answers either way.

# %% [markdown]
# ## Predict
#
# ??? question "A vLLM with two data-parallel ranks has one request, on rank 0. What does rank 1 do in the meantime?"
#     It runs the model too, on a dummy batch of one token, as often as rank 0. It has to: half of the experts live
#     there, and an exchange is over when everybody has taken part. The token is marked as padding, so it is routed
#     nowhere.
#
# ??? question "vLLM's CPU kernels want weights in another order. A loop over experts reads them anyway. What happens?"
#     No error. vLLM's re-ordered tensors have the same shape and the same strides; only the values have moved. The
#     model writes text, and it is another text. So a plugin has to step in before the order changes.
#
# ??? question "Two tensor-parallel ranks hold the same five tokens, experts are spread over both. Who sends what?"
#     If both sent all five, every expert would compute everything twice. So each takes its part, three and two, sends
#     those, and afterwards the parts are gathered.

# %% [markdown]
# ## The picture
#
# ```mermaid
# flowchart LR
#     A[attention] --> G[gate] --> R[router chooses experts]
#     A --> S[shared expert]
#     R -->|tokens, ids, weights| E[<b>the stage</b><br/>dispatch, experts, combine]
#     E -->|complete sums| P[scale, add shared, go on]
#     S --> P
# ```
#
# All boxes but one are vLLM's. The seam is where vLLM has chosen experts and wants them run, which is where every layer
# of this ladder begins: tokens, ids and weights in, sums out.
#
# vLLM asks a registry whether somebody brings another class whenever it makes a layer of a registered name. That is an
# official hook, and it is asked when the layer is *made*: it does not matter who imported what before.

# %%
from epmoe.core.errors import InputError
from epmoe.vllm_plugin import settings

for environment in ({}, {"EPMOE_STAGE": "02"}, {"EPMOE_STAGE": "fast"}, {"EPMOE_STGE": "02"}):
    try:
        found = settings.read(environment)
        print(environment, "->", found.stage if found else "vLLM as it is")
    except InputError as error:
        print(environment, "->", error)

# %% [markdown]
# The last two end the start of the server. Ignored, they would serve vLLM's own experts under our name.

# %% [markdown]
# ## Cost on paper
#
# Who brings which tokens is the one thing that has to be worked out anew. With data parallelism a rank brings what it
# has. Tensor-parallel ranks hold the same tokens, so they divide:

# %%
from epmoe.core.figures.page import prove, table
from epmoe.vllm_plugin.share import Share, most_tokens

rows = {}
for tokens in (1, 2, 5, 8):
    parts = [Share(rank, 4).slice(tokens) for rank in range(4)]
    rows[f"T = {tokens}"] = {f"rank {r}": p.stop - p.start for r, p in enumerate(parts)}
print(table(rows, "tokens of four tensor-parallel ranks"))

# %% [markdown]
# And every rank must know how many the *fullest* rank brings, since that sizes the exchange of fixed shape. Asking
# would cost a round trip in each of forty layers. vLLM knows already: its data-parallel ranks agree on their batch
# sizes once per step, before the first layer.

# %%
step = [16, 22]  # tokens of two data-parallel ranks, as vLLM records them
print(
    "without tensor parallelism:", most_tokens(16, Share(), step), "rows of each rank to each rank"
)
print("on two ranks that divide:  ", most_tokens(16, Share(0, 2), step))

# %% [markdown]
# Two data-parallel groups of two tensor-parallel ranks each, in an exchange of fixed shape: what every rank sends to
# every other if all hold all tokens of their group, and if they divide them.

# %% tags=["hide-input"]
from epmoe.core.figures import ledger_bars, matrix_picture

whole, divided = most_tokens(16, Share(), step), most_tokens(16, Share(0, 2), step)
matrix_picture({"undivided": [[whole] * 4] * 4, "divided": [[divided] * 4] * 4})

# %% [markdown]
# ## The code, in call order
#
# ### The weights, before anybody moves them
#
# ```python
# --8<-- "stages/04_vllm_plugin/epmoe/vllm_plugin/runner.py:weights"
# ```
#
# vLLM calls this object when a layer's weights are loaded. Its own one would lay them out for its kernels. Ours does
# nothing to them and builds the stage over the very same tensors; whether gate lies above up is not guessed from shapes
# but asked from vLLM's loader, with a toy row of each.
#
# ### The seam
#
# ```python
# --8<-- "stages/04_vllm_plugin/epmoe/vllm_plugin/runner.py:seam"
# ```
#
# The gate, the router with its bias and groups, the shared expert and the scaling factor stay vLLM's. Applying the
# factor here as well would be the classical mistake: the text stays fluent, and the scores of a benchmark fall.
#
# ### The stage
#
# ```python
# --8<-- "stages/04_vllm_plugin/epmoe/vllm_plugin/host.py:call"
# ```
#
# Rows that are no tokens get the id -1, which every stage treats as nothing. Then each rank takes its share, and all of
# them declare the same `max_tokens`.
#
# vLLM also keeps compiled models on disk and finds them by a hash of its configuration, of which an environment
# variable is no part. The compiled code around a stage is not the code around vLLM's own experts; so the stage's name
# joins the configuration, and the two are never mixed up.
#
# ### What vLLM does afterwards
#
# ```python
# --8<-- "stages/04_vllm_plugin/epmoe/vllm_plugin/runner.py:reduced"
# ```
#
# One property decides whether vLLM adds the output up over ranks. With experts spread over ranks a stage returns
# complete sums, and a second addition would double them. With every expert cut in pieces, which is what tensor
# parallelism without expert parallelism does, each rank has a part, and vLLM must add.
#
# ### How it ends
#
# ```python
# --8<-- "stages/04_vllm_plugin/epmoe/vllm_plugin/graphs_end.py:order"
# ```
#
# A CUDA graph that holds a collective holds the communicator too: NCCL waits with its end until the last such graph is
# gone. vLLM ends its groups first and drops some of its graphs after, in the same thread, so with a stage's exchange in
# them it generated every token and then stood still for ever. That looks like a hang of the exchange, and it took
# the stacks of both ranks to see that the text was long complete. Hence the order above.

# %% [markdown]
# ## The difference to the stage before
#
# None: it is the same layer, called by somebody else. That is the point of one seam.

# %% [markdown]
# ## Prove it
#
# Without vLLM, the host of a stage on three ranks: unequal, idle, overfull and divided.

# %%
prove("stages/04_vllm_plugin/tests/test_share.py", "-k", "unequal or divided")

# %% [markdown]
# With vLLM, where its environment is there (`python tools/setup_vllm_env.py`): `pytest stages/04_vllm_plugin`. Layers
# made by vLLM's factory are held against vLLM's own kernels, every refusal is provoked with vLLM's own objects, and a
# real model writes text on one rank, on two unequal ones and on two that divide tokens.

# %% [markdown]
# ## Measured: the same text
#
# The committed run of `epmoe vllm compare`: the small model of this repository in vLLM's CPU build, experts spread over
# two ranks, prompts of unequal number. Native vLLM runs on one rank, since its own expert parallelism does not run on a
# CPU.

# %%
import json
from pathlib import Path

from epmoe.core.figures.page import root


def show(run):
    """One comparison as a table, a line above it that says where it ran."""
    plan, machine = run["plan"], run["machine"]
    where = f"{machine['device']}, {'CUDA graphs' if plan['compiled'] else 'eager'}"
    print(f"vLLM {machine['vllm']} on {where}, {plan['dtype']}, {Path(plan['model']).name}:")
    print(f"{len(plan['prompts'])} prompts x {plan['tokens']} tokens\n")
    print(table({one["stage"]: row(one) for one in run["results"]}, "experts run on"))


def row(one):
    gap, seen = one["difference"] and one["difference"]["gap"], one["sabotage_seen"]
    speed = one["against_native"]
    return {
        "ranks": one["ranks"],
        "ids": "equal" if one["equal"] else f"differ {gap:.2f}",
        "off by": "{max_logprob_distance:.0e}, {mean_logprob_distance:.0e}".format(**one),
        "calls": calls(one),
        "spoilt": {True: "seen", False: "MISSED", None: "-"}[seen],
        "speed": "{:.2f} [{:.2f}, {:.2f}]".format(*speed) if speed else "-",
    }


def calls(one):
    ranks, device = one["calls_per_rank"], one["runs_per_rank"]
    counted = f" ({' '.join(map(str, device))})" if any(device) else ""
    return " ".join(map(str, ranks)) + counted if any(ranks) else "-"


results = Path(root(), "stages/04_vllm_plugin/results")
run = json.loads((results / "compare-cpu.json").read_text())
show(run)

# %% tags=["hide-input"]
ledger_bars(
    {
        one["stage"]: {
            "1e-6 off in log-probability": one["max_logprob_distance"] * 1e6,
            "calls of a layer": max(one["calls_per_rank"]),
        }
        for one in run["results"]
    }
)

# %% [markdown]
# `off by` is the largest and the mean distance of a log-probability from native's, `calls` those of the first MoE
# layer on each rank. Four columns, because each of them alone can lie. Equal ids could come from a plugin that never
# ran: so calls are counted by the code that runs. Equal ids could come from a model in which experts hardly matter:
# so one expert's sign is turned, in the weights that vLLM holds, and the text has to change. And ids are coarse, one
# number out of hundreds: log-probabilities show what they hide.
#
# The same on GPUs, with CUDA graphs where a stage can be captured; with two ranks every rank serves requests of its own
# and the experts are spread over both:

# %%
on_gpus = sorted(results.glob("compare-h200*.json"))
for path in on_gpus:
    show(json.loads(path.read_text()))
    print()
if not on_gpus:
    print("not measured yet")

# %% [markdown]
# On a GPU all stages are about equally far from native, and further than on a CPU: vLLM's Triton kernel multiplies
# float32 as TF32, Triton's default, and the stages do not. The ids are equal all the same. Where graphs are
# captured a layer is called more often than text has steps: vLLM captures every batch size and warms up before. In
# brackets is what the device counted, replays among them. `speed` is tokens per second over native's.
#
# The random model has the shape of glm-5.3-flash, 288 experts, and weights that mean nothing, in bfloat16. There ids
# cannot be the test. Random logits lie close together, and so do the eighth and the ninth of 288 random router
# scores: one rounding, and a token goes to another expert. How far rounding alone goes, `native-eager` shows: vLLM's
# own experts once more, without compiler and graphs. On average its log-probabilities are several times further from
# native's than the stage's are. Behind `differ` stands how much likelier native finds its own token where the first
# other one is: an exact tie for the stage in this run, and a little in the next one, below. The stage's speed is
# native's, within the interval: with two layers the time of a step is mostly not in them.
#
# The same prompts in fresh engines once more: does a text come out twice?

# %%
again = json.loads((results / "again-h200x2-random.json").read_text())
once = json.loads((results / "compare-h200x2-random.json").read_text())


def of(run, stage):
    return next(one for one in run["results"] if one["stage"] == stage)


def same(stage):
    pairs = list(zip(of(once, stage)["ids"], of(again, stage)["ids"], strict=True))
    return {
        "prompts with the same text": f"{sum(a == b for a, b in pairs)} of {len(pairs)}",
        "ids in the second": row(of(again, stage))["ids"],
    }


print(table({stage: same(stage) for stage in ("native", "03_fused_triton")}, "two runs of"))

# %% [markdown]
# Two runs are few, and what differed in native's was not looked for. A stage adds up in a fixed order, whoever arrives
# first; so there is one cause less for whoever wonders why a text changed.
#
# ## Where it loses
#
# - **Quantised models.** The stages multiply bfloat16; vLLM serves most large models in eight or four bits.
# - **Stages that wait for the host** cost the whole model its CUDA graphs, attention included. The plugin refuses them
#   until graphs are switched off, since nobody should find that out from a latency plot.
# - **The router is vLLM's kernel.** A stage that fuses the router into its pack kernel cannot do so here.
# - **End to end hides.** Attention, sampling and scheduling take most of a small model's time. A layer twice as fast
#   may not show at all, and a comparison of whole servers is no way to compare layers. It shows that nothing broke.

# %% [markdown]
# ## Exercises
#
# They are in `stages/04_vllm_plugin/exercises/`; hints and answers are folded in its README. `pytest
# stages/04_vllm_plugin` checks them.
#
# - **Read.** What would a model compute if the property above always said that sums are partial?
# - **Fill one region.** Divide tokens between tensor-parallel ranks; read vLLM's expert maps.
# - **Open.** Spoil something else than an expert, and find out what the text hides.

# %% [markdown]
# ## What still hurts
#
# The exchange is still two collectives that everybody waits in, with the experts standing still meanwhile. The next
# rungs would have to overlap the two, or send over NVLink from inside the kernel.

# %% [markdown]
# ## In the wild
#
# - **vLLM** itself keeps dispatch and combine apart from the experts in its modular kernels, which is the same cut as
#   `Exchange` and `Experts` here; its list of exchanges is closed, its runner is not
#   ([expert parallel deployment](https://docs.vllm.ai/en/latest/serving/expert_parallel_deployment/)).
# - **vLLM's plugins** are found through entry points, in every process
#   ([plugin system](https://docs.vllm.ai/en/latest/design/plugin_system/)).
# - **SGLang** has the same seam under other names: `stages/04_vllm_plugin/SGLANG.md` says what to call where.
