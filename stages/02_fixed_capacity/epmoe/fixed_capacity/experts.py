"""Experts over static shapes: where an expert's rows begin and end stays on the device.

Two ways to multiply rows that are sorted by expert, neither of which tells the host how many rows an expert has:

- `grouped_mm`, torch's grouped matrix product with offsets on the device (bfloat16 on Hopper and newer);
- `blocks` elsewhere: every expert's rows are padded to blocks of BLOCK rows. How many blocks there are is data, but
  never more than N // BLOCK + E_local, so that many are computed, each with the weights of its expert.

Worked for blocks of 2 rows, E_local = 3, slots of N = 6 assignments 2 0 -1 2 2 0: sorted order 1 5 | 0 3 4 (the -1 is
last and nobody's), counts 2 0 3, so blocks (1 5), (0 3), (4 .) of experts 0, 2, 2, and 6 // 2 + 3 - 3 = 3 unused ones.

Legend: R received rows, J places per row, N = R * J assignments, H hidden, I intermediate, M = BLOCK, B blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from epmoe.core import ledger
from epmoe.core.capabilities import Capabilities
from epmoe.core.contract import Delivers
from epmoe.core.errors import UnsupportedError
from epmoe.core.experts import weigh_and_sum, widened
from epmoe.core.memory import LayerSize, Memory
from epmoe.core.numerics import matmul_float32, swiglu
from epmoe.core.parts import ExpertsPart
from epmoe.core.split import Experts, Rows
from epmoe.core.weights import ExpertWeights

BLOCK = 16


# --8<-- [start:sort]
def sort_by_slot(slots_RJ: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Expert-major order of the assignments, and where each expert begins.

    Args:
        slots_RJ: [R, J] int32 local slots, -1 for none.
        experts: E_local.

    Returns:
        order_N [N] int64 (assignments without an expert last; stable, so rows keep their order within an expert), and
        offsets [E_local + 1] int32 on the device: expert e has order_N[offsets[e] : offsets[e + 1]].
    """
    flat_N = slots_RJ.flatten()
    key_N = torch.where(flat_N >= 0, flat_N, experts)
    sorted_N, order_N = key_N.sort(stable=True)
    borders = torch.arange(experts + 1, device=slots_RJ.device, dtype=sorted_N.dtype)
    return order_N, torch.searchsorted(sorted_N, borders).to(torch.int32)


# --8<-- [end:sort]


class StaticExperts(Experts):
    """Local experts over a fixed number of rows; the host reads nothing.

    Args:
        weights: of this rank's experts.
        product: "grouped_mm", "blocks", or "auto" for the first that runs here.
    """

    def __init__(self, weights: ExpertWeights, product: str = "auto"):
        self.weights = weights
        self.product = _choose(weights, product)

    def __call__(self, rows: Rows) -> Tensor:
        """See `Experts`. Rows without a slot are never used."""
        if self.weights.experts == 0 or rows.slots_RJ.numel() == 0:
            return rows.x_RH.new_zeros(rows.x_RH.shape, dtype=torch.float32)
        order_N, offsets = sort_by_slot(rows.slots_RJ, self.weights.experts)
        compute = self._grouped if self.product == "grouped_mm" else self._in_blocks
        return weigh_and_sum(compute(rows, order_N, offsets), rows)

    def describe(self) -> dict[str, object]:
        """The matrix product in use."""
        return {"product": self.product}

    # --8<-- [start:grouped]
    def _grouped(self, rows: Rows, order_N: Tensor, offsets: Tensor) -> Tensor:
        """f_NH bfloat16: all experts in two launches. What lies behind the last offset is not computed."""
        x_NH = rows.x_RH[order_N // rows.slots_RJ.shape[1]]
        ends = offsets[1:]
        h_NI = swiglu(F.grouped_mm(x_NH, self.weights.w13_E2IH.transpose(1, 2), offs=ends))
        y_NH = F.grouped_mm(h_NI, self.weights.w2_EHI.transpose(1, 2), offs=ends)
        ledger.record_rows(len(order_N))
        real_N1 = torch.arange(len(order_N), device=y_NH.device)[:, None] < ends[-1]
        f_NH = torch.empty_like(y_NH)
        f_NH[order_N] = torch.where(real_N1, y_NH, 0)
        return f_NH

    # --8<-- [end:grouped]

    # --8<-- [start:blocks]
    def _in_blocks(self, rows: Rows, order_N: Tensor, offsets: Tensor) -> Tensor:
        """f_NH float32: block after block, a static number of them."""
        expert_B, place_BM = block_map(offsets, len(order_N))
        spare = len(order_N)  # padding reads assignment 0, cleaned, and writes behind the end
        source_BM = torch.where(place_BM >= 0, order_N[place_BM.clamp(min=0)], 0)
        target_BM = torch.where(place_BM >= 0, source_BM, spare)
        f_NH = rows.x_RH.new_zeros(spare + 1, self.weights.hidden, dtype=torch.float32)
        x_BMH = rows.x_RH[source_BM // rows.slots_RJ.shape[1]]
        x_BMH = torch.where((place_BM >= 0)[:, :, None], x_BMH, 0)
        for block in range(len(expert_B)):
            f_NH[target_BM[block]] = self._block(x_BMH[block], expert_B[block : block + 1])
        ledger.record_rows(place_BM.numel())
        return f_NH[:spare]

    def _block(self, x_MH: Tensor, expert_1: Tensor) -> Tensor:
        """f(x) of one block. The expert is a number on the device, so its weights are picked by an index tensor."""
        w13_2IH = self.weights.w13_E2IH.index_select(0, expert_1)[0]
        w2_HI = self.weights.w2_EHI.index_select(0, expert_1)[0]
        h_MI = swiglu(matmul_float32(x_MH, w13_2IH.T)).to(x_MH.dtype)
        return matmul_float32(h_MI, w2_HI.T)

    # --8<-- [end:blocks]


# --8<-- [start:block_map]
def block_map(offsets: Tensor, assignments: int) -> tuple[Tensor, Tensor]:
    """The bounded list of blocks: each has one expert and BLOCK places in the sorted order.

    Args:
        offsets: [E_local + 1] int32, from `sort_by_slot`.
        assignments: N.

    Returns:
        expert_B [B] int32 and place_BM [B, M] int64, -1 where a block is not full or not used;
        B = min(N, N // M + E_local), a number that the host knows.
    """
    counts, experts = offsets[1:] - offsets[:-1], len(offsets) - 1
    blocks_E = (counts + BLOCK - 1) // BLOCK
    ends_E = blocks_E.cumsum(0)
    bound = min(assignments, assignments // BLOCK + experts)
    number_B = torch.arange(bound, device=offsets.device)
    expert_B = torch.searchsorted(ends_E, number_B, right=True).clamp(max=experts - 1)
    nth_B = number_B - (ends_E - blocks_E)[expert_B]  # which block of its expert
    row_BM = nth_B[:, None] * BLOCK + torch.arange(BLOCK, device=offsets.device)
    place_BM = offsets[expert_B].long()[:, None] + row_BM
    return expert_B.to(torch.int32), torch.where(row_BM < counts[expert_B][:, None], place_BM, -1)


# --8<-- [end:block_map]


def _choose(weights: ExpertWeights, product: str) -> str:
    reasons = _against_grouped_mm(weights)
    if product == "grouped_mm" and reasons:
        raise UnsupportedError(f'product="grouped_mm" cannot run here: {"; ".join(reasons)}')
    if product not in ("auto", "grouped_mm", "blocks"):
        raise UnsupportedError(f"product={product!r}: choose auto, grouped_mm or blocks")
    if product == "auto":
        return "blocks" if reasons else "grouped_mm"
    return product


def _against_grouped_mm(weights: ExpertWeights) -> list[str]:
    reasons = []
    if weights.device.type != "cuda":
        reasons.append("it needs a CUDA device")
    elif torch.cuda.get_device_capability(weights.device) < (9, 0):
        reasons.append("it needs compute capability 9.0")
    if weights.dtype != torch.bfloat16:
        reasons.append(f"it needs bfloat16, the weights are {weights.dtype}")
    if weights.hidden % 8 or weights.intermediate % 8:
        reasons.append(f"H={weights.hidden} and I={weights.intermediate} must be multiples of 8")
    for name, w_EAB in (("w13", weights.w13_E2IH), ("w2", weights.w2_EHI)):
        if not _takes_layout(w_EAB):
            reasons.append(
                f"{name} has strides {w_EAB.stride()}: rows or columns of a matrix must be dense and begin at "
                "multiples of 16 bytes"
            )
    return reasons


def _takes_layout(w_EAB: Tensor) -> bool:
    """Whether the grouped product can read the matrices where they lie: by columns or by rows, in steps of 16 bytes."""
    expert, row, column = w_EAB.stride()
    _, rows, columns = w_EAB.shape
    if column == 1 and row >= columns:
        step = row
    elif row == 1 and column >= rows:
        step = column
    else:
        return False
    starts = (w_EAB.data_ptr(), expert * w_EAB.itemsize, step * w_EAB.itemsize)
    return all(start % 16 == 0 for start in starts)


def _memory(size: LayerSize, delivers: Delivers) -> Memory:
    """Rows of all assignments before and after; by blocks they are padded, by "grouped_mm" they pass SwiGLU at once."""
    H, I, value = size.shape.hidden, size.shape.intermediate, size.dtype.itemsize
    N, R = size.assignments, size.rows(delivers.places)
    padded = BLOCK * min(N, N // BLOCK + size.local_experts)
    one_expert = H * I * (3 * value + 2 * widened(size)) + BLOCK * (4 * H + I * (value + 16))
    blocks = H * (4 * N + max(2 * value * padded, 4 * N + 8 * R)) + 48 * (N + padded) + one_expert
    at_once = N * (4 * H + 3 * I) * value + N * (16 * I + 4 * H) + 32 * N
    return Memory(kept=0, call=blocks if size.device == "cpu" else max(blocks, at_once))


EXPERTS = ExpertsPart(
    name="grouped",
    summary="torch's grouped product, or blocks of rows",
    capabilities=Capabilities(graph_capturable=True, deterministic=True),
    factory=lambda spec, workspace, delivers: StaticExperts(
        spec.weights, str(spec.options.get("product", "auto"))
    ),
    memory=_memory,
    options={
        "product": '"grouped_mm", "blocks" or "auto": how rows are multiplied with their experts'
    },
)
