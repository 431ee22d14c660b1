"""15A: core and the reference stage on a machine with neither Triton nor a GPU."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # an import of it raises ImportError
from epmoe.core import groups, registry
from epmoe.core.cases import Case
from epmoe.core.shape import MoEShape
from epmoe.core.verify import report, run_case

shape = MoEShape(hidden=16, intermediate=8, experts=4, topk=2)
for stage in ("00", "01"):
    print(report([run_case(groups.single(), Case(stage=stage, shape=shape, tokens=((3,),)))]))
for name in registry.names():
    try:
        registry.load(name)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_15A_without_triton():
    """Import and run work; a stage that needs Triton raises one clear error and takes nothing else down."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": right") == 2
    failures = [line for line in done.stdout.splitlines() if "Error" in line]
    assert all(line.startswith("UnsupportedError") for line in failures), failures
    assert all("triton" in line.lower() for line in failures), failures
