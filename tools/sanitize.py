"""Small cases of the stages with kernels of their own, for compute-sanitizer on a machine with a GPU.

    compute-sanitizer --tool memcheck  --error-exitcode 9 python tools/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tools/sanitize.py

Sizes that are no multiple of any tile, from no token up, every kind of routing; each case is held against the oracle.
"""

import itertools
import sys

import torch

from epmoe.core.cases import Case
from epmoe.core.draws import KINDS
from epmoe.core.groups import single
from epmoe.core.shape import MoEShape
from epmoe.core.verify import report, run_case

SHAPES = (
    MoEShape(hidden=64, intermediate=96, experts=8, topk=2),
    MoEShape(hidden=40, intermediate=24, experts=7, topk=3),
)
TOKENS = ((0,), (1,), (17,), (65,))


def main() -> int:
    """0 when every case is right."""
    group, wrong = single("cuda"), 0
    for shape, kind, dtype in itertools.product(SHAPES, KINDS, (torch.bfloat16, torch.float32)):
        case = Case(
            stage="fused_triton",
            shape=shape,
            tokens=TOKENS,
            kind=kind,
            dtype=dtype,
            rows=8,
            poison=False,
        )
        reports = [run_case(group, case)]
        wrong += not reports[0].right
        print(kind, report(reports).replace("\n", "; "), flush=True)
    print(f"{wrong} cases are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
