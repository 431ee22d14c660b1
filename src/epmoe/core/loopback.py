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
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from epmoe.core.ambient import called
from epmoe.core.errors import InputError
from epmoe.core.groups import EPGroup
from epmoe.core.ids import look_up
from epmoe.core.layer import MoELayer

Call = tuple[Tensor, Tensor, Tensor]


@dataclass
class _Recording:
    """What the peers send to the layer that is played.

    Attributes:
        packing: what their rows were packed by.
        inbox: [EP, C, row_bytes] as this rank receives it; empty before the first source.
    """

    packing: object
    inbox: Tensor

    def keep(self, x: Tensor, source: int, rank: int) -> Tensor:
        """Take over what `source` sends to `rank` of rows packed as x [EP, C, B]; returns the inbox."""
        if self.inbox.shape != x.shape:  # else in place: captured graphs read it
            self.inbox = torch.zeros_like(x)
        self.inbox[source] = x[rank]
        return self.inbox


Recordings = WeakKeyDictionary[Any, _Recording]


class LoopbackGroup(EPGroup):
    """A group of `size` ranks of which only `rank` exists. Serves layers that exchange packed rows by equal blocks."""

    def __init__(self, rank: int, size: int, device: torch.device | str):
        if not 0 <= rank < size:
            raise InputError(f"rank={rank}: must be between 0 and {size - 1}")
        super().__init__(rank, size, torch.device(device), "loopback")
        self._recorded = new_recordings()
        self._source: int | None = None  # whose rows are being recorded

    def record_peers(self, layer: MoELayer, calls: Sequence[Call]) -> None:
        """Keep what every source rank sends to this one; calls[s] are the arguments that rank s would bring.

        Recording again replaces what was kept of this layer. A layer of which nothing was recorded receives what was
        recorded last through one that packs its rows alike (the same map and mask, the same rule for lost experts):
        layers of a chain differ only in weights, which peers do not send. One round: no call may bring more tokens than
        the layer holds at once.

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
        before = self._recorded.pop(layer, None)  # so that it comes last
        inbox = torch.empty(0) if before is None else before.inbox
        self._recorded[layer] = _Recording(_packing(layer), inbox)
        try:
            for self._source, call in enumerate(calls):
                with layer.spec.tables.seen_from(self._source):
                    layer(*call, max_tokens=most)
        except BaseException:
            del self._recorded[layer]  # rows of some sources only
            raise
        finally:
            self._source = None

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
        layer: Any = called.get()
        if self._source is not None:
            return self._recorded[layer].keep(x, self._source, self.rank)
        found = self._of(layer)
        for one in found:
            if one.packing == _packing(layer) and one.inbox.shape == x.shape:
                return one.inbox
        most = found[0].inbox.shape[1] if found else "the most of any peer"
        raise InputError(
            f"nothing was recorded for {x.shape[1]} tokens per rank in rows of {x.shape[2]} bytes, with this layer's "
            f"map and mask: call record_peers first, and then with max_tokens={most}"
        )

    def _of(self, layer: object) -> list[_Recording]:
        """The layer's own recording, or all, the latest first; none for rows that no layer sends."""
        if layer is None:
            return []
        own = self._recorded.get(layer)
        return [own] if own is not None else list(self._recorded.values())[::-1]

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


def new_recordings() -> Recordings:
    """None yet; by layer, the latest last."""
    return WeakKeyDictionary()


def _packing(layer: Any) -> object:
    """What else than tokens, routing and the sizes of a row decides what a peer's layer would send."""
    spec = layer.spec
    return spec.placement, spec.tables.gone, spec.lost


def local_share(ids_TK: Tensor, owner_E: Tensor, rank: int) -> Tensor:
    """ids, with -1 for all that `rank` does not own: what a loopback layer computes of a source's token."""
    return torch.where(look_up(owner_E, ids_TK, -1) == rank, ids_TK, -1)
