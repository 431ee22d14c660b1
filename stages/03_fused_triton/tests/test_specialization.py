"""How many kernels a layer compiles does not depend on how many tokens its ranks bring.

Triton compiles a kernel anew for an integer of 1 and for multiples of 16. T differs by rank, so one rank would compile
in the middle of a call while its peers wait in the all-to-all. Run as a program, this file prints how many variants
Triton would compile, as JSON; the test starts it with the interpreter off. No GPU is needed: nothing is launched.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

TOKENS, CAPACITIES = (1, 2, 3, 16, 17, 48), (48, 49, 64)
ROWS = (
    (33, 46, 48),
    (2046, 2048, 2050),
)  # of 16 slots each: tiles and programs of which some are multiples of 16


def variants() -> dict[str, int]:
    """kernel -> how many different keys Triton finds in what its launcher passes, in all calls together."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from epmoe.fused_triton.kernels import dispatch, metadata, reduce

    backend = make_backend(GPUTarget("cuda", 90, 32))
    keys: dict[str, set] = {}

    def note(kernel, grid, *args, pdl=False, **meta):
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, key, options = bind(*args, PDL=pdl, **meta)
        keys.setdefault(kernel.fn.__name__, set()).add(str((key, sorted(options.items()))))

    for module in (dispatch, metadata, reduce):
        setattr(module, "launch", note)  # noqa: B010
    for capacity in CAPACITIES:
        for tokens in TOKENS:
            pack_and_merge(tokens, capacity)
    for rows in (*ROWS[0], *ROWS[1]):
        group(rows)
    return {kernel: len(found) for kernel, found in keys.items()}


def pack_and_merge(tokens: int, capacity: int) -> None:
    """What depends on T and C."""
    import torch

    from epmoe.core.packed_rows import RowLayout
    from epmoe.fused_triton import kernels

    H, K, E, EP = 64, 2, 4, 2
    x_TH, logits_TE = torch.zeros(tokens, H), torch.zeros(tokens, E)
    ids_TK, weights_TK = torch.zeros(tokens, K, dtype=torch.int32), torch.zeros(tokens, K)
    owner_E, slot_E = torch.zeros(2, E, dtype=torch.int32)
    row_bytes = RowLayout(H, K, torch.float32).row_bytes
    send = torch.zeros(EP, capacity, row_bytes, dtype=torch.uint8)
    kernels.route_and_pack(x_TH, owner_E, slot_E, send, ids_TK, weights_TK, logits_TE=logits_TE)
    kernels.merge_ranks(torch.zeros(EP, capacity, H), torch.zeros(tokens, H))


def group(rows: int) -> None:
    """What depends on the number of slots; that number itself stays specialized, since masks of loads end at it."""
    import torch

    from epmoe.fused_triton import kernels

    slots_RJ = torch.zeros(rows, 16, dtype=torch.int32)
    kernels.group_slots(slots_RJ, 3, kernels.make_tiles(slots_RJ.numel(), 3, 16, "cpu"))


def test_no_number_of_tokens_compiles_a_kernel_of_its_own():
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    expected = ("route_pack", "merge", "group", "count", "place")
    assert found == {f"_{name}_kernel": 1 for name in expected}


if __name__ == "__main__":
    assert Path(__file__).name == "test_specialization.py"
    print(json.dumps(variants()))
