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
# # Send exactly what is needed
#
# !!! abstract "This page"
#     **Time** 20 minutes to read, seconds to run. **Hardware** any CPU. **Before this** [the
#     reference](../00_reference/walkthrough.md).
#
#     **File**: `epmoe/variable_a2a/layer.py`.
#
#     **Afterwards you can** route tokens with a variable all-to-all, say why the host has to wait for it, and say in
#     advance when it sends fewer bytes than sending everything, and when it sends more.
#
#     **One number** In the toy, the rows that cross between ranks fall from 4 to **2**.

# %% [markdown]
# ## The problem, measured
#
# The reference gives every token to every rank. How many of the rows that a rank receives can it use? Counted on real
# draws, 32 experts, K = 4, 8 tokens on each rank:

# %% tags=["hide-input"]
from epmoe.core.draws import draw
from epmoe.core.figures.page import counted, measured, prove, table
from epmoe.core.launch import RankPool
from epmoe.core.placement import contiguous
from epmoe.core.plan import drawn_load, expected_load, wire_bytes
from epmoe.core.shape import SHAPES

pool = RankPool(4, "cpu")  # starts in the background
tiny, usable = SHAPES["tiny"], {}
for ep in (2, 4, 8, 16, 32):
    placement = contiguous(tiny.experts, ep)
    ids = [draw("uniform", 8, tiny.topk, placement, seed=r)[0] for r in range(ep)]
    hits = sum(map(sum, drawn_load(tiny, ids, placement).hits_SD))
    received = ep * ep * 8
    usable[f"EP={ep}"] = {
        "rows received": received,
        "of use": hits,
        "percent": 100 * hits / received,
    }
print(table(usable, "all-gather"))

# %% [markdown]
# The more ranks, the fewer rows are of use. And an uneven batch makes it worse, since every rank pads to the fullest:

# %% tags=["hide-input"]
batches = {"T = 8 8 8 8": (8, 8, 8, 8), "T = 64 1 0 3": (64, 1, 0, 3)}
books = {
    (stage, batch): counted(pool, stage, tokens)
    for stage in ("reference", "variable_a2a")
    for batch, tokens in batches.items()
}
before = {batch: books["reference", batch][0] for batch in batches}
print(table(before, "reference"))

# %% [markdown]
# ## Predict
#
# New plan: one row for each (token, expert) pair, an **assignment**, and only to the owner rank of that expert.
#
# | rank | token | names | owners |
# |---|---|---|---|
# | 0 | 0 | experts 0, 1 | 0, 0 |
# | 0 | 1 | experts 1, 2 | 0, 1 |
# | 1 | 2 | experts 2, 3 | 1, 1 |
# | 1 | 3 | experts 0, 3 | 0, 1 |
#
# ??? question "How many rows cross between ranks? How many does rank 0 receive in all, and in which order?"
#     Two cross: token 1 goes to rank 1 for expert 2, token 3 goes to rank 0 for expert 0. Rank 0 receives four rows:
#     token 0 twice (once for each of its experts), token 1, and token 3. What rank 0 sent itself comes first, since
#     blocks arrive in the order of their source ranks.
#
# ??? question "A model with K = 8 runs on EP = 4 ranks. Does this plan send fewer bytes than sending everything?"
#     No, it sends *twice as many*. Sending everything costs 3 rows for each token, one for each other rank. Here a
#     token makes 8 rows, of which 3/4 leave on average: 6. The rule: **it saves bytes when K is smaller than EP.**

# %% [markdown]
# ## The picture

# %%
from epmoe.core.figures import ledger_bars, matrix_picture
from epmoe.core.figures.route import route_picture, row_bytes, rows_sent
from epmoe.core.toy import TOY, call_toy

route_picture(TOY, "variable_a2a")

# %% [markdown]
# No hatched row is left: who receives a row has work for it. The matrix of rows is no longer the same in every cell,
# and that is the whole difficulty: **it is data**. Only the router knows it, and the router ran on the device.

# %% tags=["hide-input"]
matrix_picture({stage: rows_sent(TOY, stage) for stage in ("reference", "variable_a2a")})

# %% [markdown]
# ## Cost on paper
#
# The toy's row is smaller too: hidden values, one slot and one weight, in place of K of each.

# %%
for stage in ("reference", "variable_a2a"):
    (out, home), sent = row_bytes(TOY, stage), rows_sent(TOY, stage)
    rows = sent[0][1] + sent[1][0]
    total = rows * (out + home)
    print(f"{stage:13} {rows} rows x ({out} out + {home} home) = {total} bytes")

# %% [markdown]
# At real size, 8 tokens a rank, uniform routing: bytes of both exchanges of all ranks, in MB. The third column is a
# plan between the two: a token goes to each rank that it hits, but *once*, however many of its experts live there.

# %% tags=["hide-input"]
glm, bytes_by_ep = SHAPES["glm-5.3-flash"], {}
for ep in (2, 4, 8, 16, 32):
    load = expected_load(glm, ep, 8)
    row = {}
    for scheme in ("all_gather", "variable", "dedup"):
        wire = wire_bytes(scheme, glm, load)
        row[scheme] = (sum(wire.dispatch_bytes) + sum(wire.combine_bytes)) / 1e6
    bytes_by_ep[f"EP={ep}"] = row
print(table(bytes_by_ep, f"{glm.name}, K={glm.topk}"))

# %% [markdown]
# At EP = 8 = K the first two meet, as predicted. From there on the variable plan wins, and its lead grows with every
# rank.

# %% [markdown]
# ## The code, in call order
#
# ### Dispatch: sort by owner
#
# ```python
# --8<-- "stages/01_variable_a2a/epmoe/variable_a2a/layer.py:dispatch"
# ```
#
# An all-to-all wants one contiguous block for each destination. So assignments are sorted by owner rank; the sort is
# stable, so that a block keeps the order of its tokens. Assignments without an expert (id -1) get the owner EP, one
# past the last rank: they sort behind everything and are cut off.
#
# By hand on rank 1 of the toy, whose tokens name (2, 3) and (0, 3):

# %%
owner_N = TOY.placement.owner_table()[TOY.ids_TK(1).flatten().long()]
order_S = owner_N.argsort(stable=True)
print("assignments belong to ranks ", owner_N.tolist())
print("sorted by owner             ", order_S.tolist())
tokens = TOY.tokens_of(1)
print("so the rows carry tokens    ", [tokens[n // 2] for n in order_S.tolist()])
print("rows to rank 0 and to rank 1", owner_N.bincount(minlength=2).tolist())

# %% [markdown]
# `order_S` is also the way home: row i of what comes back belongs to assignment `order_S[i]`. It never travels.
#
# ### Counts: the host has to ask
#
# ```python
# --8<-- "stages/01_variable_a2a/epmoe/variable_a2a/layer.py:counts"
# ```
#
# To post an exchange of [unequal blocks](../../ideas/all-to-all.md), the *host* must know how long each is:
# `all_to_all_single` takes the split sizes as a Python list, and the receive buffer has to be allocated. What a rank
# sends, it could count itself. What it *receives*, only the others know, so a first, tiny exchange carries the counts.
# Then come two reads, and at each the host waits until the device has done everything queued so far:
#
# ```mermaid
# sequenceDiagram
#     participant H as host
#     participant D as device
#     H->>D: sort, count, exchange counts
#     Note over H: waits, queues nothing
#     D-->>H: rows to and from every rank
#     H->>D: three exchanges of rows, sort by expert
#     Note over H: waits again
#     D-->>H: rows of every expert
#     H->>D: expert products, exchange home, sum
#     Note over D: idle while the host catches up
# ```
#
# A wait costs twice. The host stands still; and afterwards the device does, because nothing is queued. A [CUDA
# graph](../../ideas/cuda-graphs.md), which replays a fixed list of launches without any host, is out of reach: the
# list is not fixed.
#
# ### What arrives
#
# On both ranks of the toy, read off the rows that the real layer received:

# %%
calls = pool.run(call_toy, "variable_a2a", ranks=2)
for call in calls:
    rows = [f"token {t} for slot {slots[0]}" for t, slots in call.received()]
    print(f"rank {call.rank}: {', '.join(rows)}")
    sizes = [size for _, size in call.collectives]
    print("        bytes that leave, by exchange:", sizes)

# %% [markdown]
# ### Combine: everything home, then add in order
#
# ```python
# --8<-- "stages/01_variable_a2a/epmoe/variable_a2a/layer.py:combine"
# ```
#
# The counts swap their roles, so no new exchange of counts is needed. Each assignment lands in its own place [T, K,
# H], and the K of a token are added first to last, in float32. The order is fixed and written down, so the result is
# the same bits whenever the inputs are. In the reference the order was the collective's own.

# %% [markdown]
# ## The difference to the stage before
#
# The experts are the same. One exchange replaces the other:
#
# ```diff
# --8<-- "diff/00_reference--01_variable_a2a/layer.py.diff"
# ```

# %% [markdown]
# ## Prove it

# %%
prove("stages/01_variable_a2a/tests/test_toy.py", "--ranks", "2")

# %%
print(books["variable_a2a", "T = 64 1 0 3"][1])

# %% [markdown]
# Everything: `pytest stages/01_variable_a2a`. With random draws: `epmoe check variable_a2a --ranks 4`.

# %% [markdown]
# ## Measured: what one call does
#
# The same layer and the same batches as in the problem above.

# %% tags=["hide-input"]
for batch in batches:
    stages = {s: book for (s, b), (book, _) in books.items() if b == batch}
    print(table(stages, batch), end="\n\n")

# %% tags=["hide-input"]
ledger_bars(
    {
        s: {k: book[k] for k in ("collectives", "host syncs", "KiB sent", "launches")}
        for (s, b), (book, _) in books.items()
        if b == "T = 64 1 0 3"
    }
)

# %% [markdown]
# On the uneven batch the bytes fall to a fraction. On the even one they hardly move, and the rule says why: here K =
# 4 and EP = 4. What was paid for it is in the first two columns: one more collective, and three waits where there was
# one.
#
# The time on a GPU, from the committed measurements (*floor* and *eager*: [the reference's
# page](../00_reference/walkthrough.md#measured-what-one-call-does)), and then the reference's:

# %%
print(measured("01_variable_a2a"))

# %%
print(measured("00_reference"))

# %% [markdown]
# On two GPUs it was slower than the reference at T = 1, and no faster at 8 and 128. EP = 2 is far below K = 8: there it
# sends more bytes than the reference, and waits three times where that waits once.

# %% [markdown]
# ## Where it loses
#
# - **K at or above EP.** One row for each assignment is more than one row for each rank.
# - **Decode.** A few tokens weigh nothing on the wire; five collectives and three waits weigh the same as ever. The
#   reference wastes bytes, but at decode bytes are not the bottleneck.
# - **CUDA graphs.** Impossible, so every small operator pays its launch.
# - **Memory that nobody can bound in advance.** If all tokens choose experts of one rank, that rank receives all EP ·
#   T · K rows. A batch that fits today may not fit tomorrow.
# - **Skew.** The slowest rank decides. Sending less does not help if all of it goes to one place.

# %% [markdown]
# ## Exercises
#
# They are in `stages/01_variable_a2a/exercises/`; hints and answers are folded in its README. `pytest
# stages/01_variable_a2a` checks them.
#
# - **Read.** Token 0 names experts 0 and 1, both on rank 0. Its row arrives there twice. Which line would have to
#   change so that it travels once, and what would `combine` have to know?
# - **Fill one region.** `sort_by_owner_skeleton.py`: what goes where? `bring_home_skeleton.py`: the way home.
# - **Open.** Hidden values, slots and weights travel in three exchanges. Pack them in one. How many collectives are
#   left, and how many waits?
#
# ??? question "Answer to the first"
#     `order_S[...] // topk` picks the token of each assignment. To send a token once per rank, deduplicate (token,
#     owner) pairs before the sort, and let the row carry K slots, as in the reference. The owner then returns one sum
#     for each row, and `combine` adds at most EP rows of a token instead of K.
#
# ??? question "Answer to the last"
#     Three collectives: counts, rows, results. The waits stay. They come from the *sizes*, not from the number of
#     exchanges; as long as a size is data, the host has to read it.

# %% [markdown]
# ## What still hurts
#
# The device knows everything that it needs. Only the host has to be told, because buffers have sizes that depend on
# data. So the next page gives up exact sizes: it pads, sends rows that nobody needs, and thereby never has to ask.
#
# Next: [never wait for the host](../02_fixed_capacity/walkthrough.md).

# %% [markdown]
# ## In the wild
#
# - **torchtitan** does this in training: `AllToAllTokenDispatcher` in `torchtitan/models/common/token_dispatcher.py`
#   sorts assignments by expert with a stable argsort, exchanges counts, reads both split lists on the host (the code
#   marks that line as a device-to-host sync), then exchanges rows. It keeps the routing weights at home and applies
#   them after the return, which saves four bytes a row and the weight exchange.
# - **DeepEP**'s normal kernels (V1) send a token once to each rank that it hits. They also have the CPU wait for the
#   received counts, and the documentation says that this rules out CUDA graphs unless the worst case is declared,
#   within one node ([docs/legacy.md](https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md)).
# - **Megatron Core** calls its version `MoEAlltoAllTokenDispatcher` ([token_dispatcher][megatron]).
# - **vLLM** offers DeepEP's high-throughput kernels for prefill, where this scheme is at home ([expert parallel
#   deployment](https://docs.vllm.ai/en/latest/serving/expert_parallel_deployment/)).
# - **FlashInfer**'s two-sided NVLink exchange also sends each token to the ranks that own its experts, alone
#   ([NVLinkTwoSidedAlltoAll](https://docs.flashinfer.ai/generated/flashinfer.moe_ep.NVLinkTwoSidedAlltoAll.html)).
#
# [megatron]: https://docs.nvidia.com/megatron-core/developer-guide/latest/apidocs/core/core.transformer.moe.token_dispatcher.html

# %% tags=["hide-cell"]
pool.close()
