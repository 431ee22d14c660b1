"""torch's way to see every operator, without what its first use would import."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` for eager code.

    torch guards `__torch_dispatch__` against being compiled, and for that imports its compiler at the first operator:
    seconds of CPU in every process. Nothing here is compiled.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
