"""What the caller's torch modes must not change: a layer computes the same bits under any of them.

A host program may have set another default dtype or device (vLLM does while it loads a model), run under autocast, or
build under inference mode and call outside of it. Tensors here name their dtype and device; these see to the rest.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

called: ContextVar[object] = ContextVar("called", default=None)
"""The layer whose call is under way in this thread: for a group that has to know whose rows it is given."""


@contextmanager
def building() -> Iterator[None]:
    """Around whatever outlives a call: tensors that may be written to in any mode, by torch's own defaults."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def calling(device: torch.device, layer: object = None) -> Iterator[None]:
    """Around a call, of `layer` where it is one: no gradients, products in the dtypes that they are written in."""
    before = called.set(layer)
    try:
        with torch.no_grad(), no_autocast(device):
            yield
    finally:
        called.reset(before)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream: nothing may be read, waited for or made to last."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off: it would round products that are float32 on purpose, a router's among them."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()  # the usual case, and cheaper
