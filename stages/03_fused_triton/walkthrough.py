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
# # Fuse it
#
# !!! abstract "This page"
#     **Time** 40 minutes to read, less than a minute to run. **Hardware** any CPU: Triton's interpreter runs the real
#     kernels; the gain shows on a GPU. **Before this** [never wait for the host](../02_fixed_capacity/walkthrough.md).
#
#     **Files**, in reading order: `epmoe/fused_triton/exchange.py`, `experts.py`, `fusions.py`, then `kernels/`:
#     `dispatch.py`, `router.py`, `metadata.py`, `gemm_kernels.py`, `reduce.py`; last `tuning.py`.
#
#     **Afterwards you can** say where one kernel has to end and the next begin, build a work list on the device that
#     the host never reads, write a grouped product that gathers its rows and multiplies by routing weights on its way
#     out, and tell what each fusion saves.
#
#     **One number** From router logits to the result, with every fusion off and then on, launches in one call at T = 1
#     fall from some 80 to **6**.

# %% [markdown]
# ## The problem, measured
#
# The stage before never waits. It launches, though: 8 tokens on each of 4 ranks, 32 experts, K = 4, counted by the
# ledger on real ranks:

# %% tags=["hide-input"]
from epmoe.core.figures.page import ablations, counted, measured, prove, table, times
from epmoe.core.launch import RankPool
from epmoe.core.plan import plan
from epmoe.core.shape import SHAPES

pool = RankPool(4, "cpu")  # starts in the background
batch = (8, 8, 8, 8)
stages = ("reference", "variable_a2a", "fixed_capacity", "fused_triton")
books = {stage: counted(pool, stage, batch) for stage in stages}
print(table({stage: books[stage][0] for stage in stages[:3]}, "T = 8 8 8 8"))

# %% [markdown]
# That is without the router, and on a CPU, where the products alone are dozens of blocks. To see what is *around* the
# products, take this stage with two Triton products and everything else, router included, in torch operators: at T = 1
# a call launches some 80 times (counted at the end of this page).
#
# Is a launch expensive? Compare it with what cannot be saved. At decode, the least that a rank can do is read the
# weights of its active experts once: the *floor*. Say that everything beside it may take a tenth of it. In
# microseconds, for a layer of real size on 4 H200s, how long may one launch take?

# %% tags=["hide-input"]
glm, budget = SHAPES["glm-5.3-flash"], {}
for tokens in (1, 8, 32, 128):
    floor_us = plan(glm, 4, tokens, "h200").floor_seconds * 1e6
    budget[f"T={tokens}"] = {
        "floor": floor_us,
        "if there are 80": f"{0.1 * floor_us / 80:.2f}",
        "if there are 6": f"{0.1 * floor_us / 6:.2f}",
    }
print(table(budget, "us for one launch"))

# %% [markdown]
# At one token, a kernel among 80 would have to be over in a tenth of a microsecond: about 200 clock cycles, less than
# one trip to the GPU's memory and back. No tuning of a kernel gets there. There must be *fewer kernels*.

# %% [markdown]
# ## Predict
#
# Fusing means: values stay in registers in place of going to memory, and the next step starts without a launch. So
# why not one kernel for everything?
#
# ??? question "gate-up makes h, down multiplies h. Why are these two kernels and not one?"
#     Programs of a launch run in any order and do not wait for each other. One tile of down's result needs a *whole*
#     row of h, which many programs of gate-up make, each some columns. "All of them are done" is what the end of a
#     kernel says. A kernel ends where a program needs what *other* programs wrote.
#
# ??? question "Where else does that happen between logits and result? Count the kernels."
#     Routing one token, copying it, telling each rank its experts: all of it needs that token alone, so it is one
#     kernel. Then the exchange. To place one assignment, *all* assignments must be known: metadata. The products need
#     all of metadata: gate-up; down. The sum over a row's K places needs tiles of different experts: reduce. The
#     exchange home. The sum over ranks: merge. Six.
#
# ??? question "The host does not know how many tiles the products have. How many programs does it start?"
#     As many as it likes. A program that finds no tile leaves at once, and one that finds several does them in a
#     loop. The length of the list stands on the device, and only the device reads it.

# %% [markdown]
# ## The picture
#
# The exchange is the stage before's, byte for byte: every token to every rank, one row home for each (token, rank).
# What is new happens inside of the ranks.

# %%
from epmoe.core.figures import BLUE, FAINT, MUTED, ORANGE, Picture, box, canvas, ledger_bars, write
from epmoe.core.figures.route import route_picture
from epmoe.core.toy import TOY, call_toy

route_picture(TOY, "fixed_capacity")

# %% [markdown]
# Rank 0 of the toy receives 4 rows with K = 2 places, so 8 *assignments*, numbered as they lie: 2 · row + place. Half
# of them name an expert here. One kernel lists them expert by expert and cuts the list into tiles; the products work
# on tiles alone. A tile has room for 16 rows, the least that Triton multiplies, and here only 2 of them are taken.
# (The kernels call the number of an assignment its `slot`. Elsewhere, `slots_RJ` included, an expert slot is where an
# expert lies among the experts of its rank.)

# %% tags=["hide-input"]
arrived = [(0, 1), (1, -1), (-1, -1), (0, -1)]
experts_N = [expert for row in arrived for expert in row]
order_N = sorted(range(8), key=lambda n: (experts_N[n] % 3, n))  # -1 % 3 is 2: last
figure, axes = canvas(92, 33)
for y, title, numbers in ((5, "as received", range(8)), (20, "expert by expert", order_N)):
    write(axes, 1, y + 2, title, ha="left", weight="bold")
    for place, number in enumerate(numbers):
        expert, x = experts_N[number], 20 + place * 8.8
        color = (BLUE, ORANGE, MUTED)[expert]
        box(axes, x, y, 7.6, 4.2, color, hatch=expert < 0)
        write(axes, x + 3.8, y + 2.1, str(number), weight="bold", color=color)
        if y == 5:
            name = f"row {number // 2}, " + ("nobody" if expert < 0 else f"e{expert}")
            write(axes, x + 3.8, y - 1.8, name, size=8, color=MUTED)
            end = 23.8 + order_N.index(number) * 8.8
            axes.plot((x + 3.8, end), (9.4, 19.8), color=FAINT if expert < 0 else color, lw=1.2)
for tile, color in enumerate((BLUE, ORANGE)):
    left = 20 + tile * 17.6
    axes.plot((left, left + 16.4), (25.6, 25.6), color=color, lw=2)
    words = f"tile {tile}: expert {tile},\npositions {2 * tile} to {2 * tile + 2}"
    write(axes, left + 8.2, 29, words, size=9, color=color)
write(axes, 72, 29, "no tile: nothing is read,\nnothing is computed", size=9, color=MUTED)
Picture(figure, "assignments 0 6 1 2 form two tiles, one for each expert; 3 4 5 7 belong to none")

# %% [markdown]
# ## Cost on paper
#
# Between kernels, values do go to memory. How much is that beside the weights? An assignment reads x once, writes and
# reads h (I values), and writes and reads its result f (H float32 values):

# %% tags=["hide-input"]
traffic, H, I, K = {}, glm.hidden, glm.intermediate, glm.topk
for tokens in (1, 8, 128, 2048):
    weights_mb = plan(glm, 4, tokens, "h200").slowest.floor.weight_bytes / 1e6
    between_mb = tokens * K * (2 * H + 2 * 2 * I + 2 * 4 * H) / 1e6
    traffic[f"T={tokens}"] = {
        "weights": weights_mb,
        "x, h and f": between_mb,
        "percent": 100 * between_mb / weights_mb,
    }
print(table(traffic, "MB, EP=4"))

# %% [markdown]
# So at decode, buffers between kernels are free, and launches are not. That is why this stage fuses *steps* until six
# kernels are left, and then stops. At prefill the buffers begin to matter, and so does their size, since any rank
# may receive everything: EP · C · K assignments.

# %% tags=["hide-input"]
room = {f"C={c}": {"GB": 4 * c * K * (2 * I + 4 * H) / 1e9} for c in (8, 128, 1024, 8192)}
print(table(room, "h and f, EP=4"))

# %% [markdown]
# ## The code, in call order
#
# A Triton kernel is a function that runs once for each *program* of a grid. `tl.program_id` says which one this is,
# `tl.arange` makes a vector of offsets, `tl.load` and `tl.store` move vectors between memory and registers under a
# mask. On a CPU the interpreter runs the same source as Python, one program after the other, so that this page can
# work each kernel on the toy. It has to be chosen before Triton is imported:

# %%
from epmoe.fused_triton import interpreter

interpreter.prepare("cpu")  # sets TRITON_INTERPRET=1, and makes sure that it counts
import torch

from epmoe.core.packed_rows import RowLayout
from epmoe.fused_triton import kernels

calls = pool.run(call_toy, "fused_triton", ranks=2)
print("launches on 2 real ranks:", [call.ledger["launches"] for call in calls])
print("worst error:", ["tiny" if call.worst < 1e-6 else call.worst for call in calls])

# %% [markdown]
# ### Route and pack
#
# Stage before: a handful of torch operators for the router, then masks, a broadcast and five strided copies. Now
# program (t, j) takes one token. It chooses the token's experts from the logits, in registers, looks up where they
# live, and writes the token's row for one rank (or for all of them, where there are many tokens).
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/dispatch.py:pack"
# ```
#
# Worth a look: x is *asked for* before the router runs, so that it travels while the router thinks. Rows past T get
# ids and a flag, but no hidden values. And weights of unknown ids become 0 here, since they may be anything.
#
# The router makes K rounds of "largest score, then smallest id that has it". Comparing floats and breaking ties in
# one reduction is awkward, so scores become integers that sort alike; NaN becomes the smallest.
#
# Token 1 of the toy names experts 1 and 2 with weights 0.75 and 0.25. These logits say so; the pack kernel routes:

# %%
layout = RowLayout(TOY.shape.hidden, TOY.shape.topk, torch.float32)
tables = TOY.placement.owner_table(), TOY.placement.slot_table()
logits_TE = torch.tensor([[3.0, 1.9014, -9, -9], [-9, 1.0986, 0, -9]])
ids_TK, gates_TK = torch.full((2, 2), -7, dtype=torch.int32), torch.zeros(2, 2)
send_DCB = torch.zeros(2, 2, layout.row_bytes, dtype=torch.uint8)
kernels.route_and_pack(
    TOY.x_TH(0), *tables, send_DCB, ids_TK, gates_TK, logits_TE=logits_TE, rule=TOY.shape.router
)
print("chosen   ", ids_TK.tolist(), [[round(w, 2) for w in row] for row in gates_TK.tolist()])
for rank in range(2):
    print(f"for rank {rank}", layout.slots(send_DCB[rank]).tolist())

# %% [markdown]
# Without logits it reads ids and weights, which callers with a router of their own bring. Pack both ranks of the toy
# so, and do the all-to-all by hand: rank 0 gets the first block of everybody.

# %%
sent = [torch.zeros(2, 2, layout.row_bytes, dtype=torch.uint8) for _ in range(2)]
for rank, send_DCB in enumerate(sent):
    ids_TK, gates_TK = TOY.ids_TK(rank), TOY.gates_TK(rank)
    kernels.route_and_pack(TOY.x_TH(rank), *tables, send_DCB, ids_TK, gates_TK)
received = [layout.unpack(torch.stack([send_DCB[d] for send_DCB in sent])) for d in range(2)]
rows = received[0]
print("expert slots on rank 0:", rows.slots_RJ.tolist())
assert [tuple(row) for row in rows.slots_RJ.tolist()] == [s for _, s in calls[0].received()]

# %% [markdown]
# ### Metadata: the list of tiles
#
# Stage before: a sort, a search for the borders, and a map of blocks, a few dozen operators. Sorting is more than is
# needed. An assignment's place in the list is *the number of assignments that must stand before it*: all of smaller
# experts, and earlier ones of its own. So each program counts, for its 16 assignments, and writes them where they
# belong. Nobody waits, nothing is raced for, and the order is stable. One more program counts the experts and writes
# the tiles.
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/metadata.py:group"
# ```
#
# N² comparisons for N assignments sounds wasteful. It is the cheap way: the ids of a decode step are a few kilobytes,
# and comparing is what a GPU has plenty of. Above 8,192 assignments it is not, and two launches (count, then place)
# take over.
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/metadata.py:tiles"
# ```

# %%
tiles = kernels.group_slots(rows.slots_RJ, 2, kernels.make_tiles(8, 2, 16, "cpu"))
print("by expert, then in order", tiles.sorted_slots.tolist())
print("offsets                 ", tiles.offsets.tolist())
print("tiles in the list       ", tiles.num_tiles.item())
for expert, first, end, total in tiles.tiles.tolist():
    print(f"  expert {expert}, positions {first} to {end}   (and: {total} tiles in all)")

# %% [markdown]
# The list's length stands in *every* entry. A program of the products reads the entry that it starts with anyway, and
# learns from the same load whether there is work for it. How long can the list get? The host must know that much,
# to allocate it: each active expert rounds up once.

# %%
for assignments, experts, tile_rows in (
    (8, 2, 16),
    (17, 9, 16),
    (4 * 8 * 8, 72, 16),
    (4 * 2048 * 8, 72, 128),
):
    most = kernels.max_tiles(assignments, experts, tile_rows)
    print(
        f"{assignments:6,} assignments, {experts:2} experts, tiles of {tile_rows:3} rows: at most {most:5,} tiles"
    )

# %% [markdown]
# ### Where do rows come from? Three ways
#
# The products need the rows of a tile. These lie anywhere in the received buffer, each beside its ids and weights.
#
# 1. **Prepare**: a kernel first unpacks x, ids and weights into buffers of their own. It is what MoEFlow, an
#    unpublished plugin for vLLM, does, and what this stage does with `without="gather"`.
# 2. **In place**: the product computes, for each of its rows, where that row was received, and loads from there. Row
#    = assignment // K. No kernel, no copy, and rows for nobody are never touched. This is the rule here.
# 3. **Side by side**: with hundreds of rows for an expert, a kernel copies them in the list's order. Then the copy
#    engine of Hopper GPUs (TMA) can fetch whole tiles, which it cannot do for scattered rows. Tuned configurations
#    say `tma_rows` where that pays.
#
# The first way as code, and on the toy. Only rows that some expert here reads are copied; the rest become zeros:
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/dispatch.py:prepare"
# ```

# %%
rows.x_RH[2] = float("nan")  # token 2 came to rank 0 for nobody: whoever reads it will show it
prepared = kernels.prepare_rows(rows, 2)
print(
    "received: a row every", rows.x_RH.stride(0), "values; prepared: every", prepared.x_RH.stride(0)
)
print("row 2 received", rows.x_RH[2].tolist(), "and prepared", prepared.x_RH[2].tolist())

# %% [markdown]
# ### gate-up, with the gather in front and SwiGLU behind
#
# One program computes a tile of h: up to BLOCK_M rows of one expert, BLOCK_N columns. It carries *two* sums, gate and
# up, over the same rows, so SwiGLU needs nothing from any other program and happens before h is ever stored.
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/gemm_kernels.py:gate_up"
# ```
#
# Read it for four things. *The loop over work items* is the answer to the third prediction. *The order of tiles*: a
# few row tiles share a block of weights while that is in the cache. *Weights first*: their address needs the tile
# alone, while x has to wait for the numbers of its assignments. And *clamping, not branching*: positions past the
# tile's end repeat the last assignment, whose row is masked off.
#
# `BLOCK_R` is a second, smaller tile below the first, under the same weights: 128 + 64 rows make 192, which Triton's
# powers of two do not allow. It is 0 except in prefill configurations; the table of tiles below shows one as 192 rows.
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/gemm_kernels.py:multiply"
# ```
#
# `SWAP` is a decode matter. Hopper's tensor cores multiply 64 rows on the left at a time. With 2 rows of tokens 62 of
# them would be padding. Turned around, weights are on the left, of which there are always enough.
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/gemm_kernels.py:swiglu"
# ```

# %%
own = [TOY.weights(rank) for rank in range(2)]
config = kernels.GemmConfig(16, 16, 16, num_stages=1)
h_NI = torch.full((8, 2), float("nan"))
kernels.gate_up(rows, own[0].w13_E2IH, tiles, h_NI, config)
print(f"{'position':>8}  {'assignment':>10}  h")
for position, number in enumerate(tiles.sorted_slots.tolist()):
    print(f"{position:8}  {number:10}  {[round(v, 4) for v in h_NI[position].tolist()]}")

# %% [markdown]
# Positions 4 to 7 were never written, and the NaN of row 2 is nowhere. By hand, for position 2, which is assignment
# 1: row 0, expert 1.

# %%
gate_I, up_I = (own[0].w13_E2IH[1] @ rows.x_RH[0]).split(2)
by_hand_I = torch.nn.functional.silu(gate_I) * up_I
print([round(v, 4) for v in by_hand_I.tolist()])
torch.testing.assert_close(h_NI[2], by_hand_I)

# %% [markdown]
# ### down, with the routing weight on its way out
#
# The same loop with one sum. What is new is its end: the float32 sum is multiplied by the routing weight, which is
# read from the received row, and goes not to its position but to its assignment's *number*. So the list's order ends
# here.
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/gemm_kernels.py:weigh"
# ```

# %%
f_NH = torch.full((8, 4), float("nan"))
kernels.down(rows, h_NI, own[0].w2_EHI, tiles, f_NH, config)
for number, f_H in enumerate(f_NH.tolist()):
    print(f"assignment {number}  {[round(v, 4) for v in f_H]}")

# %% [markdown]
# Assignments without an expert stay unwritten. Clearing f would cost a write of the whole buffer in every call.
#
# ### Reduce, at the owner
#
# One program per row and stretch of columns adds the row's K places, first to last. A place without an expert is not
# read. No atomic additions anywhere: those add in the order in which programs happen to finish, and bits would change
# from call to call.
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/reduce.py:reduce"
# ```

# %%
y_RH = torch.empty(4, 4)
kernels.reduce_slots(rows.slots_RJ, f_NH, 2, y_RH)
for row, y_H in enumerate(y_RH.tolist()):
    print(f"row {row} = {'assignments 0 and 1' if row == 0 else 'one assignment' if row in (1, 3) else 'none':19}",
          [round(v, 4) for v in y_H])  # fmt: skip

# %% [markdown]
# ### Merge, at home
#
# Rank 1 does the same with what it received. Then sums go home, and the source adds ranks in ascending order.
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/kernels/reduce.py:merge"
# ```
#
# All six kernels in a row, for both ranks, in this one process. The result has the same *bits* as that of the two real
# ranks:


# %%
def owner_side(rank):
    """Four kernels: what rank `rank` owes to every row that it received."""
    came, weights = received[rank], own[rank]
    tiles = kernels.group_slots(came.slots_RJ, 2, kernels.make_tiles(8, 2, 16, "cpu"))
    h_NI, f_NH, y_RH = torch.empty(8, 2), torch.empty(8, 4), torch.empty(4, 4)
    kernels.gate_up(came, weights.w13_E2IH, tiles, h_NI, config)
    kernels.down(came, h_NI, weights.w2_EHI, tiles, f_NH, config)
    kernels.reduce_slots(came.slots_RJ, f_NH, 2, y_RH)
    return y_RH.unflatten(0, (2, 2))  # [source, C, H]


owed = [owner_side(rank) for rank in range(2)]
for source, call in enumerate(calls):
    y_TH = torch.empty(2, 4)
    kernels.merge_ranks(torch.stack([y_SCH[source] for y_SCH in owed]), y_TH)
    print(f"rank {source}: the same bits as its real call: {torch.equal(y_TH, call.y_TH)}")
    assert torch.equal(y_TH, call.y_TH)

# %% [markdown]
# ### The ring variant
#
# Some systems pass one partial sum around a ring of ranks, and each adds its part. What is passed on has the layer's
# dtype, so it is rounded after *every* rank. `ring=True` does the same rounding, to compare with such systems on equal
# terms. Three parts of one value, in bfloat16, whose next value above 1 is 1 + 1/128:

# %%
parts_D11 = torch.tensor([1.0, 1 / 256, 1 / 256])[:, None, None]
for ring in (False, True):
    y_TH = torch.empty(1, 1, dtype=torch.bfloat16)
    kernels.merge_ranks(parts_D11, y_TH, ring=ring)
    print(f"{'rounded after every rank' if ring else 'rounded once':25} {y_TH.item()}")

# %% [markdown]
# ### The experts, all together
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/experts.py:experts"
# ```
#
# One buffer, f, has two dtypes. It is float32 until the last sum, so that nothing is rounded on the way. Only under
# the tiles of a long prefill, where moving f costs, it has the layer's dtype and is rounded once, after the weight.
#
# One thing is left that the ledger cannot see. Even in a CUDA graph a kernel waits until the last program of the one
# before has ended, while most of the GPU is idle. *Programmatic dependent launch* (Hopper and later) lets it start
# early and wait inside, at `pdl_wait`, at the last moment. Before that line a kernel may only touch what no earlier
# kernel of the chain writes.
#
# ### Which tiles?
#
# The best tile depends on the GPU and on how many rows an expert gets. `epmoe tune` measures; the result is a JSON
# file beside the code, and at run time there is nothing but a lookup, since timing in a serving process would give
# every rank its own answer. What was measured exactly wins; else the nearest that was measured, if it is not far; else
# a rule.
#
# ```python
# --8<-- "stages/03_fused_triton/epmoe/fused_triton/tuning.py:look_up"
# ```
#
# The entries that ship for one GPU, read from that file (gate-up: rows x columns x summed):

# %% tags=["hide-input"]
from dataclasses import replace

from epmoe.fused_triton.tuning import Tuning, entries

known, shipped = entries("NVIDIA H200"), {}
for where in sorted(known, key=lambda where: where.tokens):
    tile = known[where].gate_up
    shipped[f"T={where.tokens}"] = {
        "rows/expert": where.rows_per_expert,
        "tile": f"{tile.tile_rows}x{tile.block_n}x{tile.block_k}",
        "stages": tile.num_stages,
        "warps": tile.num_warps,
        "weights left": "yes" if tile.swap_ab else "",
        "rows by TMA": "yes" if tile.tma_rows else "",
    }
print(table(shipped, f"H={where.hidden}, E_local={where.experts}"))

# %%
limits = kernels.DeviceLimits(shared_memory=232448, tma=True)
asked = {
    "T=8, as measured": replace(where, tokens=8),
    "T=6": replace(where, tokens=6),
    "T=8, H=512": replace(where, tokens=8, hidden=512),
    "another GPU": replace(where, device="NVIDIA A100-SXM4-80GB"),
}
for words, situation in asked.items():
    print(f"{words:17} {Tuning(situation, limits, itemsize=2).choice(situation.tokens).source}")

# %% [markdown]
# A tuner measures what it is given. Half tiles once won here: an expert with 180 rows fills one tile of 128 and 52 rows
# of a second, and a last tile with no more than 64 rows can be computed by half. In the layer they lost to what had
# been there before at T = 2048, a prefill on one GPU's share of four ranks, microseconds:

# %% tags=["hide-input"]
before, half = "h200-loopback-ep4-prefill", "tried/h200-half-tiles-ep4-prefill"
print(times("03_fused_triton", {"before": before, "tuned with half tiles": half}))

# %% [markdown]
# The two runs also differ in how rows are fetched (by TMA or not) and in the grid, so this compares two configurations,
# not one switch. (T = 512 and 8192 say nothing about half tiles: neither run used them there.)
#
# The tuner's rows had lain side by side. Those of an exchange are packed with their expert slots and weights and begin
# anywhere in a cache line, which should make them slower to gather, so that the copies for TMA pay off; how much of
# the difference that is, we did not measure apart. Now the tuner packs its rows, and half tiles are gone.
#
# A size that nobody tuned borrows the nearest one's tile, and that can be dear. Two H200s side by side, the second with
# an entry for T = 1024 (at 2048 each had one, which differed a little in the second product):

# %% tags=["hide-input"]
tiles = {"borrowed": "tried/h200-neighbour-tile-ep4", "of its own": "tried/h200-own-tile-ep4"}
print(times("03_fused_triton", tiles))

# %% [markdown]
# A tile says in which order products are added. So a token's last bits may depend on how many other tokens came with
# it: another T, another tile. Training and debugging want otherwise. `batch_invariant=True` pins the tile of C for
# every call:

# %%
for pinned in (False, True):
    tuning = Tuning(replace(where, tokens=2048), limits, itemsize=2, pinned=pinned)
    tiles_used = {tuning.choice(tokens).config.gate_up for tokens in (1, 8, 128, 2048)}
    print(
        f"batch_invariant={pinned!s:5}  {len(tiles_used)} different gate-up tiles for T = 1, 8, 128, 2048"
    )

# %% [markdown]
# It costs speed wherever that one tile is the wrong one: the tile of a full prefill at T = 1 is mostly padding.

# %% [markdown]
# ## The difference to the stage before
#
# The exchange. Five copies and a mask became a launch, a sum became a launch, and unpacking is gone.
#
# ```diff
# --8<-- "diff/02_fixed_capacity--03_fused_triton/exchange.py.diff"
# ```

# %% [markdown]
# ## Prove it

# %%
prove("stages/03_fused_triton/tests/test_toy.py", "--ranks", "2")

# %%
print(books["fused_triton"][1])

# %% [markdown]
# Everything: `pytest stages/03_fused_triton`. Each kernel is held against plain torch on nasty sizes, with NaN in
# every fresh buffer and canaries behind its end; `test_fusions.py` switches each fusion off alone and compares bits;
# `test_compile.py` compiles every kernel for GPUs that are not there, since the interpreter forgives what a compiler
# does not.

# %% [markdown]
# ## Measured: the fusion ladder
#
# All fusions off, then one more switched on in every row. Off means: the same mathematics in torch operators. One
# token on each of 4 ranks, from logits to the result, launches on the busiest rank, counted on real ranks:

# %% tags=["hide-input"]
from epmoe.core import ledger
from epmoe.core.cases import Case
from epmoe.core.verify import build_case
from epmoe.fused_triton.fusions import FUSIONS


def launches(group, case):
    """One call from logits; what it launched. A rank program."""
    layer = build_case(group, case)
    x_TH = case.tokens_of(0, group.rank)
    generator = torch.Generator().manual_seed(group.rank)
    logits_TE = torch.randn(len(x_TH), case.shape.experts, generator=generator)
    with ledger.record() as book:
        layer.from_logits(x_TH, logits_TE, max_tokens=1)
    layer.close()
    return book.launches.total()


off, ladder, before = list(FUSIONS), {}, None
for name in ("all off", *FUSIONS):
    if name in off:
        off.remove(name)
    options = {"without": ",".join(off)}
    case = Case(stage="fused_triton", shape=SHAPES["tiny"], tokens=((1,) * 4,), options=options)
    count = max(pool.run(launches, case))
    ladder[name if name == "all off" else f"+ {name}"] = {
        "launches": count,
        "saved": "" if before is None else before - count,
        "what": FUSIONS.get(name, "two Triton products, the rest in torch"),
    }
    before = count
for name, row in ladder.items():
    print(f"{name:11} {row['launches']:3} {row['saved']!s:>4}   {row['what']}")

# %% [markdown]
# Two rows look odd, and are not. The router is fused *into* the pack kernel, so alone it saves nothing; its share
# comes with the next row. And "overlap" saves time between launches, not launches. Six is the count of decode: above
# 8,192 assignments metadata takes two launches, and where a tuned tile wants rows side by side, copying them is one
# more.
#
# What each is worth in time, a GPU has to say: the layer of glm-5.3-flash with one fusion switched off, against all
# on, whole layers in one graph, side by side (`epmoe bench --subjects 03,03:-pack,...`). Microseconds that it costs
# to do without:

# %% tags=["hide-input"]
print(ablations("03_fused_triton"))

# %% [markdown]
# Pack (without it the router falls back to torch as well) and metadata cost 61 to 67 us at one token and 81 to 92 at
# 128: small operators, one after the other. Reduce grows with the rows that it has to add; merge is worth 3 to 10.
# Reading rows in place and starting kernels early stay near the 2% below which no claim is made here: a copy of a few
# rows is cheap, and a graph leaves little room between its kernels. They stay, since they cost nothing; they are not
# what makes this layer fast.
#
# Against the stages before, on the batch of this page's beginning:

# %% tags=["hide-input"]
print(table({stage: book for stage, (book, _) in books.items()}, "T = 8 8 8 8"))

# %% tags=["hide-input"]
ledger_bars(
    {s: {k: book[k] for k in ("collectives", "host syncs", "KiB sent", "launches")}
     for s, (book, _) in books.items()}
)  # fmt: skip

# %% [markdown]
# The wire is unchanged, as promised. Rows done are fewer than before, since only tiles of active experts are computed,
# and still more than needed: a tile has 16 rows, and an expert here has a few. On a GPU at decode that padding is
# arithmetic in the shadow of reading weights.
#
# The time on a GPU, from the committed measurements:

# %%
print(measured("03_fused_triton"))

# %% [markdown]
# ## Where it loses
#
# - **A CPU.** Interpreted kernels are for looking and for proofs. The stage before is the one to run there.
# - **Memory.** h and f hold EP · C · K rows, since one rank might own every expert that anybody names. The table
#   above says what that is at prefill capacities. Several rounds with a small C are the way out.
# - **A new shape, a new GPU.** Sizes are compiled in, so the first call of each waits for a compiler (`warmup()`
#   before serving), and without a measured entry the tile is a guess.
# - **A size between two measured ones** takes a neighbour's tiles. The shortest prompt of the table on tiles had such
#   ones, and vLLM's default was faster there. `epmoe tune` for that size is the way out.
# - **Equal bits across batches** have a price: `batch_invariant` gives up the best tile for all sizes but one.
# - **f.** It is written and read once more only because sums need an order. Atomic additions would save that and give
#   up equal bits.
# - **Rows for nobody** still arrive: pack writes them, the wire carries them, metadata looks at EP times the
#   assignments that matter.
# - **Maintenance.** Torch operators become better with every release; a kernel becomes better when somebody tunes it.

# %% [markdown]
# ## Exercises
#
# They are in `stages/03_fused_triton/exercises/`; hints and answers are folded in its README. `pytest
# stages/03_fused_triton` checks them. Kernels run in the interpreter, so `print` works inside.
#
# - **Read.** What if the host starts too many programs, or too few? Why can unwritten rows of f not leak? Why is the
#   weight applied in down and not earlier?
# - **Fill one region.** `tile_list_skeleton.py`: offsets and tiles from counts. `merge_skeleton.py`: the sum over
#   ranks.
# - **Open.** Fuse reduce into down. What has to be given up?

# %% [markdown]
# ## What still hurts
#
# Six kernels and two exchanges. What is left to the kernels at decode is, by the table above, reading weights; now the
# exchanges stand out. Each is a collective of its own, in which all ranks first find each other, then move a few
# kilobytes, then make sure that everybody is done. The fewer the tokens, the larger the share of such meetings. While
# they last, no weight is read, and no fusion *inside* a rank can touch them.
#
# What could: the pack kernel writes its rows straight into the other ranks' memory and sets a flag behind them, and the
# first product waits for flags in place of a kernel's end. Then dispatch is no launch at all. NVLink allows it; it
# takes memory that all ranks can address, and care with the order of writes.
#
# And there is a question that no layer answers alone: what does it do in a real engine, under a real model?
#
# Next: [inside vLLM](../04_vllm_plugin/walkthrough.md).

# %% [markdown]
# ## In the wild
#
# - **vLLM**'s fused experts are a Triton kernel of this kind: rows are read through sorted token ids, and
#   `moe_align_block_size` pads every expert to blocks and lists the expert of each block
#   ([fused_moe.py](https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/layers/fused_moe/fused_moe.py)).
#   Tiles come from a JSON file for each E, N and device name, by batch size; the closest one is taken
#   ([configs](https://github.com/vllm-project/vllm/tree/main/vllm/model_executor/layers/fused_moe/configs)).
# - **vLLM** also lets a layer return its result with the top-k sum still open, so that the next operator of the model
#   adds it up ([MoEOutput](https://docs.vllm.ai/en/latest/api/vllm/model_executor/layers/fused_moe/moe_output/)): the
#   other answer to the open exercise.
# - **FlashInfer**'s Hopper kernels fuse SwiGLU into the first product, have a switch for a fused final sum
#   (`use_fused_finalize`) and one for programmatic dependent launch (`enable_pdl`)
#   ([cute_dsl_fused_moe_bf16](https://docs.flashinfer.ai/generated/flashinfer.fused_moe.cute_dsl.cute_dsl_fused_moe_bf16.html)).
#   Its TensorRT-LLM kernels start from routing logits.
# - **Megatron Core** builds its tables on the device by Triton kernels with fixed-size buffers, so that the layer can
#   be captured, and runs a persistent grid
#   ([vllm_fused_moe](https://docs.nvidia.com/megatron-core/developer-guide/nightly/apidocs/core/core.inference.moe.vllm_fused_moe.html)).
# - **MoEFlow**, an unpublished plugin for vLLM, has the same five steps as kernels: metadata, grouped product, pack,
#   a kernel that prepares the experts' input, and a combine in fixed order, with a ring variant in bfloat16. This
#   stage follows it, reads rows in place, and fuses the router as well.
# - **DeepEP**'s low-latency combine takes the routing weights and adds the K copies of a token where it came from
#   ([docs/legacy.md](https://github.com/deepseek-ai/DeepEP/blob/main/docs/legacy.md)); here the owner adds first, and
#   one row for each rank comes home.
# - **torchtitan** fills the permutation for its grouped products by a Triton kernel, every expert padded to an
#   alignment ([indices.py](https://github.com/pytorch/torchtitan/blob/main/torchtitan/experiments/kernels/moe/indices.py)).
# - **ScatterMoE** ([arXiv:2403.08245](https://arxiv.org/abs/2403.08245)) reads and writes scattered rows inside of the
#   product, without padded copies; **MegaBlocks** ([arXiv:2211.15841](https://arxiv.org/abs/2211.15841)) sees the same
#   products as block-sparse.

# %% tags=["hide-cell"]
pool.close()
