"""Write constraints.txt from an environment that works:

    .venv/bin/python -m pip list --format=freeze | .venv/bin/python tools/pin.py

Local build tags (+cpu) are dropped, so that one file serves machines with and without a GPU.
"""

import sys
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "constraints.txt"
# what an environment brings by itself, and the project
LEFT_OUT = {"pip", "setuptools", "wheel", "epmoe"}
LINUX_ONLY = {"triton"}
HEADER = """\
# Versions that are known to work together, for all extras but vllm. Written by tools/pin.py; used by `make setup`.
"""


def pins(frozen: str) -> list[str]:
    """Constraint lines, sorted by name, from `pip list --format=freeze`."""
    lines = []
    for line in frozen.splitlines():
        name, _, version = line.strip().partition("==")
        if not version or name.lower() in LEFT_OUT:
            continue
        marker = "; sys_platform == 'linux'" if name.lower() in LINUX_ONLY else ""
        lines.append(f"{name}=={version.split('+')[0]}{marker}")
    return sorted(lines, key=str.lower)


if __name__ == "__main__":
    TARGET.write_text(HEADER + "\n".join(pins(sys.stdin.read())) + "\n")
    print(f"wrote {TARGET}")
