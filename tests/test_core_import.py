"""15A: every stage on a machine without Triton, or with one that the kernels are not written for."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules[{missing!r}] = None  # an import of it raises ImportError
from epmoe.core import groups, registry
from epmoe.core.cases import Case
from epmoe.core.errors import UnsupportedError
from epmoe.core.shape import MoEShape
from epmoe.core.verify import report, run_case

shape = MoEShape(hidden=16, intermediate=8, experts=4, topk=2)
for stage in ("00", "01", "02", "auto", "03", "fused_capacity+loop", "fixed_capacity+triton"):
    try:
        print(stage, report([run_case(groups.single(), Case(stage=stage, shape=shape, tokens=((3,),)))]))
    except UnsupportedError as error:
        print(stage, "refused:", error)
"""


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("triton", "needs triton, which is not installed"),
        ("triton.tools.tensor_descriptor", "lacks something they need (import of triton.tools"),
    ],
)
def test_15A_without_triton(missing, why):
    """Stages and pairs that need Triton are refused in words when they are built; all others work."""
    program = PROGRAM.format(missing=missing)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    right = [line.split()[0] for line in done.stdout.splitlines() if ": right" in line]
    refused = [line for line in done.stdout.splitlines() if "refused:" in line]
    assert right == ["00", "01", "02", "auto"], done.stdout
    assert [line.split()[0] for line in refused] == [
        "03",
        "fused_capacity+loop",
        "fixed_capacity+triton",
    ]
    assert all(why in line and "pip install" in line for line in refused), refused
