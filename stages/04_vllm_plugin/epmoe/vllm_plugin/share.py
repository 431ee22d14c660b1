"""Which tokens a rank brings to the stage, and what all ranks know about each other without asking.

Legend: T tokens that vLLM hands to this rank's layer, TP ranks that hold the same tokens, DP ranks with other tokens.
With data parallelism alone a rank brings what it has. Tensor-parallel ranks hold the same T tokens: each brings its
part, and the parts are gathered afterwards. With vLLM's sequence parallelism they come cut already.
Worked: T = 5 on TP = 2 is cut to 3 and 2 tokens; on TP = 4 to 2, 2, 1 and 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


# --8<-- [start:share]
@dataclass(frozen=True)
class Share:
    """How `ranks` tensor-parallel ranks, of which this is `rank`, divide tokens; ranks=1 means not at all."""

    rank: int = 0
    ranks: int = 1

    def part(self, tokens: int) -> int:
        """The tokens of the fullest rank."""
        return -(-tokens // self.ranks)

    def slice(self, tokens: int) -> slice:
        """This rank's tokens; empty where the others have them all."""
        size = self.part(tokens)
        return slice(min(self.rank * size, tokens), min((self.rank + 1) * size, tokens))

    def pad(self, y_tH: Tensor, tokens: int) -> Tensor:
        """y_tH with zero rows up to part(tokens), so that all ranks gather blocks of one size."""
        missing = self.part(tokens) - len(y_tH)
        return y_tH if not missing else torch.cat([y_tH, y_tH.new_zeros(missing, y_tH.shape[1])])


# --8<-- [end:share]


# tokens per rank: beyond, a second round costs little next to the products of the first
ENOUGH_AT_ONCE = 2048


def capacity_for(most: int, captured: int, share: Share) -> int:
    """C where nothing else is asked for: what fits one step of vLLM, but no more than buffers should be made for.

    Args:
        most: tokens of the largest step (max_num_batched_tokens); the same on all ranks.
        captured: tokens of the largest batch in a CUDA graph, which has to be one round; 0 for none.
        share: how tokens are divided.

    Worked: steps of up to 16384 tokens, graphs of up to 512: C = 2048, a full step is eight rounds.
    """
    return min(share.part(most), max(ENOUGH_AT_ONCE, captured))


def most_tokens(tokens: int, share: Share, sizes: Sequence[int] | None) -> int:
    """The most tokens that any rank of the expert group brings to this call: the same number on every rank.

    Args:
        tokens: T of this rank.
        share: how they are divided.
        sizes: vLLM's own record of this step, T of every rank of the group; None where all ranks have the same T.
    """
    return share.part(max(sizes) if sizes else tokens)
