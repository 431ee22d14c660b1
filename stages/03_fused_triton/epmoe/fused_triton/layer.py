"""The same two all-to-alls; everything around them is a handful of kernels.

What changes: pack, metadata, both products with their gather and SwiGLU, and both sums are one Triton kernel each.
Why: at decode the layer should do nothing but stream the weights of the active experts; every launch beside that costs.
When it wins: always on a GPU; most at one token, where launches are most of the time.
What it costs: kernels to maintain and to tune, and intermediate buffers of EP * C * K rows.

    logits -route, pack-> send ==> recv -group-> tiles -gate_up-> h -down-> f -reduce-> y ==> home -merge-> out
"""

from epmoe.core.capabilities import Capabilities
from epmoe.core.compose import compose
from epmoe.core.contract import Delivers
from epmoe.core.layer_spec import LayerSpec
from epmoe.core.memory import LayerSize, Memory
from epmoe.core.packed_rows import PackedBuffers
from epmoe.core.parts import ExchangePart, ExpertsPart
from epmoe.core.placement import KINDS
from epmoe.core.split import Exchange, Experts
from epmoe.core.workspace import OPTION, Workspace
from epmoe.fused_triton import fusions, interpreter, weight_layout, work_list
from epmoe.fused_triton.tuner import TUNER

WITHOUT = {"without": "fusions to switch off, such as 'pack,merge': " + ", ".join(fusions.FUSIONS)}


def _exchange(spec: LayerSpec, workspace: Workspace) -> Exchange:
    interpreter.prepare(spec.device.type)
    from epmoe.fused_triton.exchange import FusedExchange

    return FusedExchange(spec, workspace)


def _experts(spec: LayerSpec, workspace: Workspace, delivers: Delivers) -> Experts:
    interpreter.prepare(spec.device.type)
    from epmoe.fused_triton.experts import TritonExperts

    return TritonExperts(spec, workspace, delivers)


def _exchange_memory(size: LayerSize) -> Memory:
    """The buffers of the stage before; a call adds contiguous copies of what it is given, at most."""
    copies = 8 * size.shape.topk + size.shape.hidden * size.dtype.itemsize
    return Memory(PackedBuffers.nbytes(size), size.capacity * copies)


def _experts_memory(size: LayerSize, delivers: Delivers) -> Memory:
    """Rows between the products, their float32 results and the list of tiles are kept; a call adds the sums."""
    H, I, N = size.shape.hidden, size.shape.intermediate, size.assignments
    tiles = 4 * work_list.words(N, size.local_experts)
    return Memory(
        kept=N * (I * size.dtype.itemsize + 4 * H) + tiles, call=4 * size.rows(delivers.places) * H
    )


EXCHANGE = ExchangePart(
    name="fused_capacity",
    summary="fixed capacity, one kernel on each side of each all-to-all",
    capabilities=Capabilities(
        transports=("single", "gloo", "nccl", "loopback"),
        placements=KINDS,
        min_arch=(8, 0),
        graph_capturable=True,
        deterministic=True,
        batch_invariant=True,
        maskable=True,
        max_topk=32,
        max_experts=1024,
        packages=("triton",),
        interpreted_on_cpu=True,
    ),
    delivers=Delivers(places="topk", sizes="static", layout="strided"),
    factory=_exchange,
    options={
        **OPTION,
        **WITHOUT,
        "ring": "round to the layer's dtype after every rank in the merge, as a ring of partial sums does (less exact)",
    },
    switches=("ring",),
    overflow="rounds",
    memory=_exchange_memory,
)

EXPERTS = ExpertsPart(
    name="triton",
    summary="a grouped GEMM of four Triton kernels",
    capabilities=Capabilities(
        min_arch=(8, 0),
        graph_capturable=True,
        deterministic=True,
        max_topk=32,
        max_experts=1024,
        packages=("triton",),
        interpreted_on_cpu=True,
    ),
    factory=_experts,
    options={
        **OPTION,
        **WITHOUT,
        "batch_invariant": "one tile size for all calls: a token's bits do not depend on its batch",
    },
    switches=("batch_invariant",),
    memory=_experts_memory,
    grants={"batch_invariant": {"batch_invariant": True}},
    tuner=TUNER,
    reasons_against=weight_layout.reasons_against,
)

STAGE = compose(
    EXCHANGE,
    EXPERTS,
    summary="the same two exchanges; everything around them in fused Triton kernels",
)
