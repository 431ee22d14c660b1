"""One GPU plays rank r of EP ranks: the same kernels on the same bytes, each exchange replaced by one local copy.

For measuring one rank's exact share where there is only one GPU; always labelled "loopback". What the other ranks
would have sent is recorded before: every peer's tokens go through the layer's own packing; the rows for rank r stay.

    group = LoopbackGroup(rank=0, size=4, device=torch.device("cuda"))
    layer = build("03", ..., group, C)
    group.record_peers(layer, [(x_TH, ids_TK, weights_TK) for each of the 4 ranks])
    y_TH = layer(x_TH, ids_TK, weights_TK)          # rank 0's own tokens again

What comes back is checkable: nobody else computes, so row t of y is the sum over all EP sources of what rank r owes
their token t. `local_share` gives the ids that the oracle needs for that.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer

Call = tuple[Tensor, Tensor, Tensor]


class LoopbackGroup(EPGroup):
    """A group of `size` ranks of which only `rank` exists. Serves layers that exchange packed rows by equal blocks."""

    def __init__(self, rank: int, size: int, device: torch.device | str):
        if not 0 <= rank < size:
            raise InputError(f"rank={rank}: must be between 0 and {size - 1}")
        super().__init__(rank, size, torch.device(device), "loopback")
        self._inbox: dict[int, Tensor] = {}  # by capacity: [EP, C, row_bytes] as rank r receives it
        self._recording: int | None = None

    def record_peers(self, layer: MoELayer, calls: Sequence[Call]) -> None:
        """Keep what every source rank sends to this one; calls[s] are the arguments that rank s would bring.

        One round: no call may bring more tokens than the layer holds at once. Recording again replaces what was kept.

        Raises:
            InputError: not one call per rank, or one with more than max_tokens_per_rank tokens.
        """
        if len(calls) != self.size:
            raise InputError(
                f"{len(calls)} calls for {self.size} ranks: give one per rank, this one included"
            )
        most, limit = max(len(x_TH) for x_TH, _, _ in calls), layer.spec.max_tokens_per_rank
        if most > limit:  # every further round would replace what the one before left here
            raise InputError(
                f"a peer brings {most} tokens, the layer holds max_tokens_per_rank={limit}: "
                "loopback plays one round, build the layer larger"
            )
        for capacity in [c for c in self._inbox if c != most]:
            del self._inbox[capacity]  # of an older recording: a call of that size must not get it
        for source, call in enumerate(calls):
            self._recording = source
            try:
                with layer.spec.tables.seen_from(source):
                    layer(*call, max_tokens=most)
            finally:
                self._recording = None

    def all_to_all(self, out, x, recv_counts=None, send_counts=None) -> None:
        """Packed rows (bytes): what the peers sent. Sums on the way home (floats): our own, block by block."""
        if recv_counts is not None or send_counts is not None:
            raise InputError(
                "a loopback group has no peers to count rows with: choose a stage of fixed shapes"
            )
        with self._exchange("all_to_all", x, x.nbytes - x.nbytes // self.size):
            out.copy_(x if x.dtype != torch.uint8 else self._received(x))

    def _received(self, x: Tensor) -> Tensor:
        """What the peers sent of rows packed as x [EP, C, B]; while recording, with x as its source's part."""
        capacity = x.shape[1]
        inbox = self._inbox.get(capacity)
        if self._recording is not None:
            if inbox is None or inbox.shape != x.shape:
                inbox = self._inbox[capacity] = torch.zeros_like(x)
            inbox[self._recording] = x[self.rank]
        if inbox is None or inbox.shape != x.shape:
            raise InputError(
                f"nothing was recorded for {capacity} tokens per rank in rows of {x.shape[2]} bytes: call record_peers "
                f"first, and then with max_tokens={next(iter(self._inbox), 'the most of any peer')}"
            )
        return inbox

    def all_gather(self, out, x) -> None:
        """Not offered: the reference's exchange has no fixed peers to play."""
        raise InputError("a loopback group cannot all-gather: choose a stage of fixed shapes")

    def reduce_scatter(self, out, x) -> None:
        """Not offered, as `all_gather`."""
        raise InputError("a loopback group cannot reduce-scatter: choose a stage of fixed shapes")

    def all_gather_ints(self, values):
        """Everybody says the same."""
        return [list(values)] * self.size

    def all_gather_objects(self, obj):
        """Everybody says the same."""
        return [obj] * self.size


def local_share(ids_TK: Tensor, owner_E: Tensor, rank: int) -> Tensor:
    """ids, with -1 for all that `rank` does not own: what a loopback layer computes of a source's token."""
    real_TK = (ids_TK >= 0) & (ids_TK < len(owner_E))
    mine_TK = real_TK & (owner_E[torch.where(real_TK, ids_TK, 0).long()] == rank)
    return torch.where(mine_TK, ids_TK, -1)
