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
# # Never wait for the host
#
# !!! abstract "This page"
#     **Time** 25 minutes to read, seconds to run. **Hardware** any CPU; the gain shows on a GPU. **Before this**
#     [send exactly what is needed](../01_variable_a2a/walkthrough.md).
#
#     **Files**, in reading order: `epmoe/fixed_capacity/exchange.py`, `experts.py`, `layer.py`, and from the core
#     `packed_rows.py` and `workspace.py`.
#
#     **Afterwards you can** lay out a token in one row of bytes, build an exchange and expert products whose shapes
#     never depend on data, and say what that freedom costs.
#
#     **One number** Host waits in one call fall from 3 to **0**.

# %% [markdown]
# ## The problem, measured
#
# The stage before sends exact numbers of rows. Here are those numbers for five steps of decoding, 4 tokens on each of
# 4 ranks, 32 experts, K = 4:

# %% tags=["hide-input"]
import json

from epmoe.core.draws import draw
from epmoe.core.figures.page import counted, measured, prove, root, table
from epmoe.core.launch import RankPool
from epmoe.core.placement import contiguous
from epmoe.core.plan import drawn_load, expected_load, plan, wire_bytes
from epmoe.core.shape import SHAPES

pool = RankPool(4, "cpu")  # starts in the background
tiny, placement, steps = SHAPES["tiny"], contiguous(32, 4), {}
for step in range(5):
    ids = [draw("uniform", 4, tiny.topk, placement, seed=10 * step + r)[0] for r in range(4)]
    received = drawn_load(tiny, ids, placement).assignments
    steps[f"step {step}"] = {f"rank {r}": rows for r, rows in enumerate(received)}
print(table(steps, "rows received"))

# %% [markdown]
# They differ from step to step and from rank to rank. So each step has to ask: exchange counts, read them on the
# host, allocate, read again in the experts. The ledger of one such call:

# %% tags=["hide-input"]
batches = ((8, 8, 8, 8), (64, 1, 0, 3))
books = {
    (stage, tokens): counted(pool, stage, tokens)
    for stage in ("reference", "variable_a2a", "fixed_capacity")
    for tokens in batches
}
print(table({"T = 8 8 8 8": books["variable_a2a", batches[0]][0]}, "variable_a2a"))

# %% [markdown]
# At decode there is little to compute and little to send. What is left is launching and waiting. A CUDA graph would
# remove both: record the launches once, replay them with one call. But a recorded list cannot ask anybody anything.

# %% [markdown]
# ## Predict
#
# New plan, one sentence: **token t of this rank goes to every rank d, always to the place send[d, t].** Each rank has
# C places for each other rank, used or not.
#
# ??? question "Where in rank 1's receive buffer does token 1 of rank 0 arrive, and who has to be told?"
#     At recv[0, 1], in every step, whatever the router says. Nobody has to be told. That is the whole trick.
#
# ??? question "Rank 0 has 2 tokens and C is 3. What is in the third row?"
#     Whatever the last call left there, NaN included. A flag in the row says that it is no token. Clearing the row
#     would cost a write of the full buffer in every call; clearing the flag costs four bytes a row.
#
# ??? question "The plan sends what the reference sends: every token to every rank. What is better, then?"
#     Two collectives in place of four, since a row carries all fields. And the experts no longer need to tell the
#     host how long their blocks are, which the reference's did.

# %% [markdown]
# ## The picture
#
# First one row, to scale, for the toy in float32. Everything that the owner must know of a token travels together:

# %%
import torch

from epmoe.core.figures import ledger_bars
from epmoe.core.figures.buffer import buffer_picture, row_picture
from epmoe.core.figures.route import route_picture
from epmoe.core.packed_rows import RowLayout
from epmoe.core.toy import TOY, call_toy

row_picture(RowLayout(TOY.shape.hidden, TOY.shape.topk, torch.float32))

# %% [markdown]
# Then the buffers, with C = 3 so that padding shows. Slots are local: the sender looks up where each expert lies, and
# writes -1 where rank d does not own it. One all-to-all of equal blocks moves the lot.

# %%
buffer_picture(TOY)

# %% [markdown]
# And the whole way, with C = 2. Two rows are for nobody again; this time that is a price paid on purpose.

# %%
route_picture(TOY, "fixed_capacity")

# %% [markdown]
# ## Cost on paper
#
# What do the superfluous rows cost? A layer of real size on 4 H200s: the time that both exchanges need at the speed
# of the links, beside the time that the experts need at least, in microseconds.

# %% tags=["hide-input"]
glm, cost = SHAPES["glm-5.3-flash"], {}
for tokens in (1, 8, 32, 128, 2048):
    limits = plan(glm, 4, tokens, "h200")
    cost[f"T={tokens}"] = {
        "exact rows": limits.wire("variable").seconds(limits.link_bandwidth) * 1e6,
        "fixed capacity": limits.wire("fixed_capacity").seconds(limits.link_bandwidth) * 1e6,
        "experts at least": limits.floor_seconds * 1e6,
    }
print(table(cost, "us, EP=4, K=8"))

# %% [markdown]
# Two things to read off. With K = 8 on 4 ranks, exact rows are *more* rows. And at decode the wire is small beside
# the weights that have to be read: giving bytes away to save a wait is a good trade there. At T = 2048 it is no
# longer small. With more ranks the gift grows:

# %% tags=["hide-input"]
growth = {}
for ep in (4, 8, 16, 32):
    load = expected_load(glm, ep, 8)
    growth[f"EP={ep}"] = {
        scheme: wire_bytes(scheme, glm, load).rows_per_needed
        for scheme in ("variable", "fixed_capacity")
    }
print(table(growth, "rows sent / rows needed"))

# %% [markdown]
# Memory is known in advance, which is a virtue: send and receive hold EP · C rows of B bytes, and EP · C rows of H
# float32 sums come home. All layers of a model share one such set, since they run one after the other.

# %% tags=["hide-input"]
row = RowLayout(glm.hidden, glm.topk, torch.bfloat16).row_bytes
memory = {f"C={c}": {"MB": 4 * c * (2 * row + 4 * glm.hidden) / 1e6} for c in (128, 1024, 8192)}
print(table(memory, "buffers of one rank, EP=4"))

# %% [markdown]
# ## The code, in call order
#
# ### Pack
#
# ```python
# --8<-- "stages/02_fixed_capacity/epmoe/fixed_capacity/exchange.py:pack"
# ```
#
# `layout.x(send)` and its sisters are *views* of the byte buffer, typed and strided, so that `=` writes straight
# into the rows. Bits are copied, never converted: dispatch is exact for every dtype.
#
# The slots are the only thing that differs between destinations. Broadcasting does it for all ranks at once:
#
# ```python
# --8<-- "stages/02_fixed_capacity/epmoe/fixed_capacity/exchange.py:slots"
# ```
#
# ### Dispatch and unpack
#
# ```python
# --8<-- "stages/02_fixed_capacity/epmoe/fixed_capacity/exchange.py:dispatch"
# ```
#
# ```python
# --8<-- "stages/02_fixed_capacity/epmoe/fixed_capacity/exchange.py:unpack"
# ```
#
# Unpacking copies nothing but the slots. What arrives on the toy, read off the real rows:

# %%
calls = pool.run(call_toy, "fixed_capacity", ranks=2)
for call in calls:
    rows = [f"token {token} {slots}" for token, slots in call.received()]
    print(f"rank {call.rank} received {', '.join(rows)}")
    print("       exchanges and bytes that leave:", call.collectives)

# %% [markdown]
# ### Sort by expert, on the device
#
# ```python
# --8<-- "stages/02_fixed_capacity/epmoe/fixed_capacity/experts.py:sort"
# ```
#
# The reference read the counts. Here the borders stay on the device, as a tensor of E_local + 1 offsets. Assignments
# without an expert get a key behind all experts and sort to the end. On rank 0 of the toy there are 4 rows of 2
# places, 8 assignments:

# %%
from epmoe.fixed_capacity.experts import sort_by_slot

arrived = [slots for _, slots in calls[0].received()]
slots_RJ = torch.tensor(arrived, dtype=torch.int32)
order_N, offsets = sort_by_slot(slots_RJ, experts=2)
print("slots of the 8 assignments ", slots_RJ.flatten().tolist())
print("sorted by expert           ", order_N.tolist())
print("offsets                    ", offsets.tolist())

# %% [markdown]
# Expert 0 has assignments 0 and 6, expert 1 has 1 and 2, the last four are nobody's.
#
# ### Multiply without knowing how many
#
# On a GPU that has it, one operator takes the offsets as they are:
#
# ```python
# --8<-- "stages/02_fixed_capacity/epmoe/fixed_capacity/experts.py:grouped"
# ```
#
# Elsewhere a classic device helps: *bound the number of pieces instead of knowing it*. Cut each expert's stretch into
# blocks of 16 rows. How many blocks there are is data. But each expert wastes less than one block, so there are never
# more than N // 16 + E_local. The host loops that often, always, and blocks that turn out to be unused compute rows
# of zeros.
#
# ```python
# --8<-- "stages/02_fixed_capacity/epmoe/fixed_capacity/experts.py:block_map"
# ```
#
# The map answers two questions for each block: whose is it (a search in the running sum of block counts), and which
# places of the sorted order does it hold. Keep it in mind: the fused kernels of the next page run on exactly such a
# list.
#
# ### Combine
#
# ```python
# --8<-- "stages/02_fixed_capacity/epmoe/fixed_capacity/exchange.py:combine"
# ```
#
# The owner has already added the K places of a token that live with it, so one row for each (token, rank) comes home.
# The source adds ranks in ascending order. Both orders are fixed, hence equal bits, call after call
# ([determinism](../../ideas/determinism.md)).

# %% [markdown]
# ## The difference to the stage before
#
# The exchange; the experts change as well, and are shown above.
#
# ```diff
# --8<-- "diff/01_variable_a2a--02_fixed_capacity/exchange.py.diff"
# ```

# %% [markdown]
# ## Prove it

# %%
prove("stages/02_fixed_capacity/tests/test_toy.py", "--ranks", "2")

# %%
print(books["fixed_capacity", batches[1]][1])

# %% [markdown]
# Everything: `pytest stages/02_fixed_capacity`. The suite fills fresh buffers with NaN, so that a padding row which
# leaks into a result shows at once. On a machine with a GPU it also captures the layer in a CUDA graph and replays it
# with other routings.

# %% [markdown]
# ## Measured: what one call does

# %% tags=["hide-input"]
for tokens in batches:
    stages = {s: book for (s, t), (book, _) in books.items() if t == tokens}
    print(table(stages, f"T = {' '.join(map(str, tokens))}"))
    print()

# %% tags=["hide-input"]
ledger_bars(
    {s: {k: book[k] for k in ("collectives", "host syncs", "KiB sent", "launches")}
     for (s, t), (book, _) in books.items() if t == batches[0]}
)  # fmt: skip

# %% [markdown]
# Two exchanges, no wait: that was the aim. Now the other columns, honestly. Launches and rows done went *up*. This is
# a CPU, where the products run block by block: 8 rows from each of 4 ranks and K = 4 make N = 128 assignments, so a
# rank with 8 experts computes 128 // 16 + 8 = 16 blocks of 16 rows, needed or not. With `grouped_mm` it is two
# launches and no block padding. But the many small operators around the products are there on every machine. Which
# ones?

# %%
from epmoe.core import groups, ledger
from epmoe.core.layer import build
from epmoe.core.weights import random_weights

small = SHAPES["toy"].with_(experts=2, name="half a toy")
group, weights = groups.single(), random_weights(small, range(2))
layer = build("fixed_capacity", small, weights, contiguous(2, 1), group, 2)
with ledger.record() as book:
    layer(TOY.x_TH(0), torch.tensor([[0, 1], [1, -1]]), TOY.gates_TK(0))
layer.close()
print(f"{book.launches.total()} launches on one rank; the most frequent:")
print(", ".join(f"{name} {count}" for name, count in book.launches.most_common(12)))

# %% [markdown]
# The time on a GPU, from the committed measurements (*floor*, *graph* and *loopback*: [the reference's
# page](../00_reference/walkthrough.md#measured-what-one-call-does)):

# %%
print(measured("02_fixed_capacity"))

# %% [markdown]
# Against the two stages before, in one run on two H200s (`h200x2-stages-ep2`), microseconds:

# %% tags=["hide-input"]
run = json.loads((root() / "benchmarks/results/h200x2-stages-ep2.json").read_text())
together = {
    stage: {f"T={p['tokens']}": round(p["subjects"][stage]["median_us"]) for p in run["points"]}
    for stage in ("00_reference", "01_variable_a2a", "02_fixed_capacity")
}
print(table(together, "whole layer, EP=2"))

# %% [markdown]
# About a tenth. Four changes are in that: no waits, hence a graph; fewer collectives; and a grouped product in place of
# a loop over up to 144 experts. What each is worth was not measured apart; the pairs `fixed_capacity+loop` and
# `all_gather+grouped` would say.

# %% [markdown]
# ## Where it loses
#
# - **Many ranks.** EP · C rows for each rank and step, needed or not. At EP = 32 the table above says how many are
#   for nobody.
# - **Prefill.** There the bytes are time, and waiting once is cheap beside the arithmetic.
# - **Uneven batches.** All ranks pad to the fullest. A caller who declares `max_tokens=` shrinks the buffers for that
#   call; a captured graph has the size that it was captured with.
# - **A capacity.** More than C tokens do not fit. They are never dropped: the call runs as several rounds, as many on
#   every rank as the fullest one needs. Unless the caller declares the size, the ranks first tell each other, on the
#   host.
# - **Without a grouped product** it computes padding, and picks each block's weights by index, which copies them.
# - **Launches.** On a CPU more than in any stage before, most of them blocks of the products. With a grouped product
#   about 60 whatever T is (63 on two H200s, 65 on four, router and exchanges included), where the loop over experts
#   launches about eight times for each active expert; of the 60, two are products.

# %% [markdown]
# ## Exercises
#
# They are in `stages/02_fixed_capacity/exercises/`; hints and answers are folded in its README. `pytest
# stages/02_fixed_capacity` checks them.
#
# - **Read.** How many rows leave a rank if C = 64, two tokens are there, and nobody declares anything? Why can a NaN
#   in a padding row not reach a result?
# - **Fill one region.** `pack_rows_skeleton.py`: one row for every (rank, token). `block_map_skeleton.py`: the
#   bounded list of blocks.
# - **Open.** Do not send the rows that are for nobody, still without the host. What does the transport have to offer?

# %% [markdown]
# ## What still hurts
#
# The layer can be captured in a CUDA graph. In a graph, waiting is gone and launching is cheap, but a kernel that
# moves a few kilobytes still has a start and an end of its own, and between two kernels everything goes to memory and
# back. The list above is the next bottleneck: dozens of small operators around two matrix products. The next page
# melts them into a few kernels.
#
# Next: [fuse it](../03_fused_triton/walkthrough.md).

# %% [markdown]
# ## In the wild
#
# - **DeepEP**'s low-latency kernels (V1) take a `num_max_dispatch_tokens_per_rank` that all ranks share, advise to
#   keep it below 256 because buffers grow with it, and are compatible with CUDA graphs
#   ([docs/legacy.md](https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md)). They write one-sidedly, so
#   rows that nobody needs are not sent: the open exercise, answered.
# - **vLLM** lists these kernels as `deepep_low_latency`, for decode, with a masked layout and CUDA graphs ([expert
#   parallel deployment](https://docs.vllm.ai/en/latest/serving/expert_parallel_deployment/)).
# - **FlashInfer**'s `MoeAlltoAll` is built with `max_num_tokens`; its exchanges take the largest number of this step
#   ([MoeAlltoAll](https://docs.flashinfer.ai/generated/flashinfer.comm.MoeAlltoAll.html)), the same pair of numbers
#   as our `max_tokens_per_rank` and `max_tokens`.
# - **MoEFlow**, an unpublished plugin for vLLM, packs hidden values, ids, weights and a flag bit for bit in one row
#   and puts token t for rank d at send[d, t]. This stage follows it.
# - **Grouped products**: PyTorch's `torch.nn.functional.grouped_mm` reads its offsets on the device. vLLM's fused
#   experts pad every expert to blocks and give the kernel the expert of each block (`moe_align_block_size`), the map
#   of this page.
# - **Not the same word**: the capacity of GShard and the Switch Transformer
#   ([arXiv:2101.03961](https://arxiv.org/abs/2101.03961)) is a limit for each *expert*, and tokens above it are
#   dropped. C here is a limit for each *rank's own* tokens, and nothing is dropped.

# %% tags=["hide-cell"]
pool.close()
