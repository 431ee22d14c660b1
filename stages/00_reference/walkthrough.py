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
# # The reference: an oracle, and the simplest layer around it
#
# !!! abstract "This page"
#     **Time** 20 minutes to read, seconds to run. **Hardware** any CPU.
#
#     **Files**, in reading order: `epmoe/reference/oracle.py`, `epmoe/reference/layer.py`, and from the core
#     `split.py` and `experts.py`.
#
#     **Afterwards you can** say what an expert-parallel layer has to compute and how you would know that it does;
#     follow a token to its experts and back; count what that costs without a GPU.
#
#     **One number** In the routing of these pages, 8 rows arrive at the owner ranks and **2 of them are for nobody**.

# %% [markdown]
# ## The problem
#
# A Mixture-of-Experts layer replaces one feed-forward network by many small ones, the experts. A router picks K of
# them for every token. A token is cheap to compute, since only K experts run; but *all* experts must lie in some
# memory, since nobody knows which ones the next token names. How much memory is that?

# %% tags=["hide-input"]
from epmoe.core.figures.page import table
from epmoe.core.plan import expert_bytes
from epmoe.core.plan.gpus import GPUS
from epmoe.core.shape import SHAPES

models = {
    name: {
        "experts": shape.experts,
        "per token": shape.topk,
        "MB an expert": expert_bytes(shape) / 1e6,
        "GB a layer": shape.experts * expert_bytes(shape) / 1e9,
        "GB all layers": shape.layers * shape.experts * expert_bytes(shape) / 1e9,
        "H200s to hold them": shape.layers
        * shape.experts
        * expert_bytes(shape)
        / GPUS["h200"].memory,
    }
    for name, shape in SHAPES.items()
    if name not in ("toy", "tiny")
}
print(table(models, "bfloat16 weights"))

# %% [markdown]
# Where the last column is above 1, one GPU cannot even hold the experts. Where it is below, spreading them still
# pays: a decode step has to *read* the weights of every active expert once, and EP GPUs read EP times as fast.
# Spreading experts over GPUs is called *expert parallelism*. Rank r of EP ranks is the **owner rank** of some
# experts. A token lives on its **source rank**, the one that ran the attention for it. A token whose expert lives
# elsewhere has to travel there, and its result has to travel home.
#
# So the layer is two problems in one. The arithmetic is easy: a weighted sum of K small networks. The *moving* is
# where every mistake hides, and where most of the ladder's work lies.

# %% [markdown]
# ## Predict
#
# All pages share one routing, small enough to follow by hand: 2 ranks, 4 experts, 4 tokens, K = 2. Rank 0 owns
# experts 0 and 1, rank 1 owns 2 and 3. Every token weighs its first expert 0.75 and its second 0.25.
#
# | rank | token | names |
# |---|---|---|
# | 0 | 0 | experts 0, 1 |
# | 0 | 1 | experts 1, 2 |
# | 1 | 2 | experts 2, 3 |
# | 1 | 3 | experts 0, 3 |
#
# The simplest plan that can work: **everybody sends every token to everybody**, each rank computes what its own
# experts owe to each token, and the parts are added up.
#
# ??? question "How many rows cross between ranks, and how many of those were worth sending?"
#     Each rank sends its 2 tokens to the 1 other rank: 4 rows cross. Token 1 names expert 2 on the other rank, and
#     token 3 names expert 0 on the other rank. Tokens 0 and 2 find all their experts at home. So 2 of the 4 were
#     worth it.
#
# ??? question "Ranks 0 and 1 both compute something for token 3. Who adds the two parts, and does the order matter?"
#     The source rank of token 3 is rank 1: it gets both parts and adds them. With two parts the order does not
#     matter. From three on it does, since float addition is not associative: another order gives other last bits, the
#     subject of [determinism](../../ideas/determinism.md). Here a collective called reduce-scatter does the adding, in
#     an order of its own; the page [All-to-all and NVLink](../../ideas/all-to-all.md) has the collectives in pictures.

# %% [markdown]
# ## The picture
#
# The ranks start in the background while the picture is drawn. Each band is what one rank sends to another; its width
# is the number of rows. Hatched rows arrive and are for nobody.

# %%
from epmoe.core.figures import matrix_picture
from epmoe.core.figures.route import route_picture, row_bytes, rows_sent
from epmoe.core.launch import RankPool
from epmoe.core.toy import TOY, call_toy

pool = RankPool(4, "cpu")
route_picture(TOY, "reference")

# %% [markdown]
# The same as a matrix. On the left what is *needed*: tokens that name at least one expert of that rank. On the right
# what is *sent*. The diagonal stays at home and costs nothing on the wire.

# %%
from epmoe.core.plan import drawn_load

load = drawn_load(TOY.shape, [TOY.ids_TK(0), TOY.ids_TK(1)], TOY.placement)
matrix_picture({"needed": load.hits_SD, "sent": rows_sent(TOY, "reference")})

# %% [markdown]
# ## Cost on paper
#
# A row on its way out carries H hidden values, K ids and K weights. A row on its way home carries H float32 sums. For
# the toy in float32 (H = 4, K = 2):

# %%
out, home = row_bytes(TOY, "reference")
crossing = sum(rows_sent(TOY, "reference")[s][1 - s] for s in range(2))
print(f"out  {crossing} rows x {out} bytes = {crossing * out} bytes")
print(f"home {crossing} rows x {home} bytes = {crossing * home} bytes")

# %% [markdown]
# For a layer of real size the same counting is `epmoe plan`. Under uniform routing, with 8 tokens on each rank:

# %% tags=["hide-input"]
from epmoe.core.plan import expected_load, wire_bytes

glm = SHAPES["glm-5.3-flash"]
growth = {}
for ep in (2, 4, 8, 16, 32):
    wire = wire_bytes("all_gather", glm, expected_load(glm, ep, 8))
    growth[f"EP={ep}"] = {
        "rows that leave": wire.rows_sent,
        "rows needed": wire.rows_needed,
        "sent / needed": wire.rows_per_needed,
    }
print(table(growth, glm.name))

# %% [markdown]
# ??? question "Why is the waste small at EP=4 and large at EP=32?"
#     A token names 8 experts. On 4 ranks, almost every rank owns one of the 8. On 32 ranks, at least 24 ranks own
#     none of them, and get the token anyway.

# %% [markdown]
# ## The code, in call order
#
# ### First the oracle
#
# Before there is a layer there is the thing that every layer is held against. It must be so plain that nobody can
# doubt it: two nested loops, no sorting, no permutation, no ranks. It shares no indexing with any layer. If it did,
# one mistake could hide in both.
#
# ```python
# --8<-- "stages/00_reference/epmoe/reference/oracle.py:oracle"
# ```
#
# The second thing it returns, `terms_T`, is the yardstick. Where two large terms cancel, the sum is small and its
# relative error is meaningless; the error is small against *what was added*.
#
# One expert is a SwiGLU network. Its first matrix holds gate and up, gate first, everywhere in this project:
#
# ```python
# --8<-- "stages/00_reference/epmoe/reference/oracle.py:expert"
# ```
#
# By hand, for token 1 of the toy, which names experts 1 and 2:

# %%
import torch

from epmoe.reference.oracle import expert_output, oracle

weights = TOY.weights()
x_H = TOY.x_TH(0)[1]
first_H, second_H = expert_output(x_H, weights, 1), expert_output(x_H, weights, 2)
by_hand_H = 0.75 * first_H + 0.25 * second_H
answer = oracle(TOY.x_TH(0), TOY.ids_TK(0), TOY.gates_TK(0), weights)
print("token 1 is  ", [round(v, 1) for v in x_H.tolist()])
print("by hand     ", [round(v, 5) for v in by_hand_H.tolist()])
print("the oracle  ", [round(v, 5) for v in answer.y_TH[1].tolist()])
torch.testing.assert_close(answer.y_TH[1], by_hand_H)

# %% [markdown]
# ??? question "Tests multiply expert e's down-projection by e + 1. Why?"
#     Many layers were once tested with experts that do nothing (identity), to see that each token comes home. Such a
#     test passes when a token visits the *wrong* expert. With the factor e + 1, a wrong expert shows as a wrong
#     result whose size names the culprit.

# %% [markdown]
# ### Then the seam
#
# Every layer of the ladder is called the same way, and most have the same three parts: an *exchange* that moves rows
# (`dispatch`, `combine`) and *experts* that compute. One rung usually replaces one part.
#
# ```python
# --8<-- "src/epmoe/core/split.py:forward"
# ```
#
# ### Dispatch: gather everything
#
# ```python
# --8<-- "stages/00_reference/epmoe/reference/layer.py:dispatch"
# ```
#
# An all-gather needs blocks of equal size, and ranks hold different numbers of tokens. So each rank pads to the
# capacity C, with ids of -1: **no expert**. Such an id counts nowhere and adds nothing.
#
# Now a rank holds global ids and must find its own. This one mask is all that makes the layer expert-parallel:
#
# ```python
# --8<-- "stages/00_reference/epmoe/reference/layer.py:slots"
# ```
#
# The map is looked up as the source rank sees it, because a hot expert may live on several ranks: the page Placements
# tells of them. In this toy, all ranks see the same.
#
# On the toy, on both ranks, read off the rows that the real layer received:

# %%
calls = pool.run(call_toy, "reference", ranks=2)
for call in calls:
    for token, slots in call.received():
        print(f"rank {call.rank} received token {token} with local slots {slots}")

# %% [markdown]
# ### Experts: sort, then one block after the other
#
# Rows that go through one expert should go together: one matrix product of many rows instead of many of one row. So
# assignments are sorted by slot. The sort is *stable*, so that rows keep their order within an expert and two runs
# give the same bits.
#
# ```python
# --8<-- "src/epmoe/core/experts.py:loop"
# ```
#
# Look at `counts.tolist()`. The host must know how long each block is before it can slice it, so it **waits** for the
# device. Hold that thought: it is the villain of the next two pages.
#
# The routing weight is applied here, by the owner, in float32. Where a place has no expert, its *weight* is replaced
# by zero: what was received there may be NaN, and 0 times NaN is NaN. Its f is zero already, since `f_NH` starts as
# zeros:
#
# ```python
# --8<-- "src/epmoe/core/experts.py:weigh"
# ```
#
# ### Combine: add up
#
# ```python
# --8<-- "stages/00_reference/epmoe/reference/layer.py:combine"
# ```
#
# Each rank holds a [EP · C, H] tensor of what it owes to every token of every rank. Reduce-scatter adds these over
# the ranks and gives each rank the C rows of its own tokens. The sum is taken in float32 and rounded once, at the
# end.

# %% [markdown]
# ## The difference to the stage before
#
# There is none: this is the first rung. From the next page on, this section shows one screen of difference.

# %% [markdown]
# ## Prove it
#
# The toy on two real ranks, against the oracle and against the picture above:

# %%
from epmoe.core.figures.page import prove

prove("stages/00_reference/tests/test_toy.py", "--ranks", "2")

# %% [markdown]
# The whole suite of this stage (routings, dtypes, odd sizes, idle ranks, failures) is `pytest stages/00_reference`.
# The same check with random draws, on as many ranks as you like, is `epmoe check reference --ranks 4`.

# %% [markdown]
# ## Measured: what one call does
#
# The ledger counts what a layer does: collectives, places where the host must wait for the device, operators
# launched, bytes that leave, rows that go through an expert. Counts need no GPU: these are the same on every machine.
# Four ranks, a layer with 32 experts and K = 4; first 8 tokens on every rank, then an uneven batch. "Rows done" went
# through an expert; "needed" were assigned to one.

# %%
from epmoe.core.figures.page import counted

even, verdict = counted(pool, "reference", (8, 8, 8, 8))
uneven, _ = counted(pool, "reference", (64, 1, 0, 3))
print(table({"T = 8 8 8 8": even, "T = 64 1 0 3": uneven}, "reference"))
print()
print(verdict)

# %% [markdown]
# Read the uneven line twice. It has 68 tokens against 32, but eight times the bytes: three ranks pad to the 64 rows
# of the fullest one. The experts are not fooled: they compute the rows that are needed and no more.
#
# The time on a GPU, from the committed measurements. *Floor*: the time to read the weights of the active experts once,
# or that of the arithmetic where it is longer ([the memory floor](../../ideas/memory-floor.md)). *Eager*: launched one
# by one; *graph*: recorded once and replayed. *Loopback*: one GPU plays one rank, and its exchanges are local copies.

# %%
from epmoe.core.figures.page import measured

print(measured("00_reference"))

# %% [markdown]
# ## Where it loses
#
# - **Many ranks.** Rows on the wire grow with EP - 1 for each token, whoever needs them.
# - **Uneven batches.** Every rank pads to the fullest one. A rank in prefill makes all ranks in decode pay.
# - **Four collectives where two would do.** Hidden values, ids and weights travel apart. At decode a collective costs
#   its latency, not its bytes.
# - **It waits for the host** once, in the expert loop. So it cannot be captured in a CUDA graph.
# - **The order of its sum is the library's.** Equal bits call after call were found on every transport that was tried,
#   but nothing here writes the order down: another library, or another number of ranks, may have another.
#
# And where it does *not* lose: few ranks, small batches. If nearly every rank is hit by nearly every token, sending
# everything wastes almost nothing, and no one has to find, count or sort anything.

# %% [markdown]
# ## Exercises
#
# They are in `stages/00_reference/exercises/`; hints and answers are folded in its README. `pytest
# stages/00_reference` checks them.
#
# - **Read.** Change the toy so that token 0 names expert 3 twice. What does the oracle say, and does the layer agree?
# - **Fill one region.** `slots_skeleton.py`: whose work is it? `reduce_scatter_skeleton.py`: who adds what?
# - **Open.** Gather ids first, and hidden values only of tokens that some other rank needs. What would the ledger
#   show?
#
# ??? question "Answer to the first"
#     An expert that is named twice counts twice: y = (0.75 + 0.25) f(x). The layer agrees, since it treats each of
#     the K places on its own. Nothing removes duplicates.

# %% [markdown]
# ## What still hurts
#
# Every token went everywhere. With many ranks, most of that was for nobody. The obvious cure: send each assignment to
# its owner, and to nobody else. The next page does that, and pays for it in a way that is easy to overlook.
#
# Next: [send exactly what is needed](../01_variable_a2a/walkthrough.md).

# %% [markdown]
# ## In the wild
#
# - **vLLM** ships this very scheme as `allgather_reducescatter`, and it is the *default* of `--all2all-backend`
#   ([expert parallel deployment](https://docs.vllm.ai/en/latest/serving/expert_parallel_deployment/)). Its manager
#   gathers hidden states, weights and ids with per-rank sizes, so that it does not pad, and combines with a
#   reduce-scatter of the same sizes (`vllm/distributed/device_communicators/all2all.py`, `AgRsAll2AllManager`). The
#   sizes are host numbers that the data-parallel ranks agree upon once per step.
# - **Megatron Core** has an all-gather token dispatcher too. Its inference version on NCCL wants the same number of
#   tokens on each rank, and captures CUDA graphs of decode steps only ([its reference][megatron]).
# - **torchtitan** and **DeepEP** send each token to the ranks that need it alone: see the next page.
#
# [megatron]: https://docs.nvidia.com/megatron-core/developer-guide/0.18.1/apidocs/core/core.transformer.moe.token_dispatcher_inference.html
#
# So do not smile at the simplest layer. At decode on a few GPUs it is the one to beat.

# %% tags=["hide-cell"]
pool.close()
