"""How far a measurement is, on standard error; also where the rank that tells it is another process.

The standard error of ranks that `launch` starts goes to a file, for the case that one dies: nobody reads along. So rank
0 writes its lines to a file of their own, and the process that started it copies them.
"""

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PAUSE = 0.5  # seconds between two looks at the file


def say(words: str, path: Path | None) -> None:
    """One line to standard error, or to the file that `followed` gave."""
    line = f"bench: {words}\n"
    if path is None:
        sys.stderr.write(line)
        sys.stderr.flush()
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(line)


@contextmanager
def followed() -> Iterator[Path]:
    """A file whose lines appear on this process's standard error soon after they are written."""
    with tempfile.TemporaryDirectory(prefix="epmoe-") as folder:
        path, over = Path(folder) / "progress", threading.Event()
        path.touch()
        thread = threading.Thread(target=_copy, args=(path, over), daemon=True)
        thread.start()
        try:
            yield path
        finally:
            over.set()
            thread.join()


def _copy(path: Path, over: threading.Event) -> None:
    ended = False
    with path.open(encoding="utf-8") as lines:
        while not ended:
            ended = over.wait(_PAUSE)  # then one last look
            if words := lines.read():
                sys.stderr.write(words)
                sys.stderr.flush()
