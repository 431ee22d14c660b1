"""Kernels on a CPU: Triton's interpreter, which has to be chosen before a kernel is defined.

Triton decides at the moment of `@triton.jit` whether a function is compiled or interpreted, by TRITON_INTERPRET; for
its own library of functions that moment is Triton's first import. So kernels are imported only when a layer is built,
when it is known where they will run, and a process runs them in one way only. Ranks that `launch` starts on a CPU have
the variable from the start.
"""

import importlib
import importlib.util
import os
import sys
from importlib.metadata import version

from epmoe.core.errors import UnsupportedError

NEEDS = "triton>=3.6,<3.8"


def prepare(device_type: str) -> None:
    """Import the kernels, and make sure that they run on `device_type` ("cpu" or "cuda").

    Raises:
        UnsupportedError: Triton is missing or another than the kernels are written for, or this process runs its
            kernels in the other way already.
    """
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError(
            f"this stage needs Triton, which is not installed: pip install '{NEEDS}'"
        )
    wanted = device_type == "cpu"
    if "triton" not in sys.modules and wanted:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        as_wanted = interpreting() == wanted
        if as_wanted:
            importlib.import_module("epmoe.fused_triton.kernels")
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"this stage's kernels are written for '{NEEDS}', and Triton {version('triton')} lacks something they need "
            f"({error}): pip install '{NEEDS}'"
        ) from error
    if not as_wanted:
        raise UnsupportedError(
            f"Triton {'compiles' if wanted else 'interprets'} its kernels in this process already, and a layer on "
            f"{device_type} needs the other way: start Python with TRITON_INTERPRET={int(wanted)}"
        )


def interpreting() -> bool:
    """Whether the kernels of this process are interpreted; Triton's own functions tell."""
    import triton

    return not isinstance(triton.language.zeros, triton.runtime.jit.JITFunction)
