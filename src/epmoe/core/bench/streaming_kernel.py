"""A kernel that only reads: what this GPU streams at best, without the GEMMs' arithmetic."""

import triton
import triton.language as tl


@triton.jit
def read_all(x_ptr, sums_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Each program reads BLOCK * STEPS int32 and stores their sum, so that no read can be left out.

    With BLOCK = 4 and STEPS = 2, program 1 reads places 8 to 15 and stores their sum at sums_ptr + 1.
    """
    program = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    start = program * BLOCK * STEPS
    total = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        total += tl.load(x_ptr + start + step * BLOCK + offs)
    tl.store(sums_ptr + program, tl.sum(total, axis=0))
