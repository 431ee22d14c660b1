"""How much memory a call holds at once, on any device, from the results of its operators."""

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from epmoe.core.dispatch_mode import DispatchMode


class LivePeak(DispatchMode):
    """The most bytes that results of operators hold at once."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, Tensor)}
        for one in out if isinstance(out, tuple | list) else (out,):
            storage = one.untyped_storage() if isinstance(one, Tensor) else None
            if storage is not None and storage._cdata not in given | set(self.alive):
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return out
