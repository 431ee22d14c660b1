"""Ask a process that hangs where it is: it writes the Python stacks of all its threads to stderr.

Not by SIGUSR1, which programs usually take for this: LLVM, inside Triton, takes it over with the first kernel that it
compiles, and no stack is ever seen. SIGURG is left alone, and a process that never heard of us ignores it.
"""

import contextlib
import faulthandler
import signal
import subprocess

REQUEST = signal.SIGURG


def tell_on_request() -> None:
    """In the process that may hang, early: from now on `ask` gets an answer, whatever Python or C code is running."""
    faulthandler.register(REQUEST, all_threads=True, chain=False)


def ask(process: subprocess.Popen) -> None:
    """Have `process` write its stacks. It takes moments; read its stderr after a while."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(REQUEST)
