"""Kernels on a CPU: Triton's interpreter, which has to be chosen before a kernel is defined.

Triton decides at the moment of `@triton.jit` whether a function is compiled or interpreted, by TRITON_INTERPRET. So the
kernels are imported only when a layer is built, when it is known where they will run, and a process runs them in one
way only.
"""

import importlib.util
import os
import sys

from epmoe.core.errors import UnsupportedError

_KERNELS = "epmoe.fused_triton.kernels"


def prepare(device_type: str) -> None:
    """Make sure that kernels imported from now on run on `device_type` ("cpu" or "cuda").

    Raises:
        UnsupportedError: Triton is missing, or this process runs its kernels in the other way already.
    """
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            "this stage needs Triton, which is not installed: pip install 'triton>=3.6,<3.8'"
        )
    wanted = device_type == "cpu"
    if _KERNELS in sys.modules:
        if interpreting() != wanted:
            raise UnsupportedError(
                f"this process {'interprets' if interpreting() else 'compiles'} its Triton kernels already, a layer on "
                f"{device_type} needs the other way: use another process"
            )
        return
    if wanted:
        os.environ["TRITON_INTERPRET"] = "1"


def interpreting() -> bool:
    """Whether the kernels of this process are interpreted."""
    import triton

    return bool(triton.knobs.runtime.interpret)
