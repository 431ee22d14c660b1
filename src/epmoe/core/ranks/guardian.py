"""A tiny process beside every pool of ranks, which cleans up when the pool's process is gone, however it ended.

It reads one JSON object a line on stdin: {"watch": pid}, {"forget": pid}, {"remove": folder},
{"quit": [command], "env": {...}}, {"end": true}. At "end" or the end of the input, which a SIGKILL of the writer causes
too, it kills the process groups it still watches, tells started services to quit, and removes the folders.
Standard library only: it starts in milliseconds.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pids, folders, services = set(), [], []
    for line in sys.stdin:
        order = json.loads(line)
        if "watch" in order:
            pids.add(order["watch"])
        elif "forget" in order:
            pids.discard(order["forget"])
        elif "remove" in order:
            folders.append(order["remove"])
        elif "quit" in order:
            services.append((order["quit"], order["env"]))
        elif "end" in order:
            break  # a forked child of the writer may hold the pipe open
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # every rank leads a session of its own
    for command, variables in services:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            environment = {**os.environ, **variables}
            subprocess.run(command, input=b"quit\n", env=environment, timeout=15, check=False)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
