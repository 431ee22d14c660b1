"""Fixed capacity: the exchange of `exchange.py` around the experts of `experts.py`.

What changes: nothing in the layer has a size that depends on the routing.
Why, when it wins, what it costs: see the two parts.

Memory formula, in bytes, whatever the routing and however long the prompt (s bytes of a value, B of a packed row,
N = EP * C * K assignments of one round, R = EP * C rows, M rows of a block, P = N + M * E_local padded rows):

    kept, or shared through `workspace`   EP * C * (2 B + 4 H)
    of one round, by "blocks"             H * (4 N + max(2 s P, 4 N + 8 R)), about 96 (N + 4 M) of indices,
                                          and s * 3 H I for the weights of one expert
    of the result                         T * H * s; a round more does not add to the others

Batch invariance. With "blocks" a term depends, bit for bit, on its token, its expert and its place among the M rows of
a block; K places and ranks are then added in a fixed order. So a token's result is the same alone, in any batch and in
rounds where the matrix library treats the M rows of a product alike. Those of torch on an AVX-512 CPU do, for float32,
bfloat16 and float16 (tests/test_batch.py looks first); a product of 1 row has other bits there than one of 16, hence
blocks of a fixed size. "grouped_mm" may choose its tiles from all sizes together, and nothing promises that a row keeps
its bits. A stage declares for all devices, so `batch_invariant` stays False.
"""

from epmoe.core.compose import compose
from epmoe.fixed_capacity.exchange import EXCHANGE
from epmoe.fixed_capacity.experts import EXPERTS

STAGE = compose(
    EXCHANGE, EXPERTS, summary="static shapes: one packed all-to-all out, one back, no host sync"
)
