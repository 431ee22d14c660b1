"""Every kernel compiles ahead of time, with no GPU, for each architecture that the stage names.

The interpreter proves indices, not that the compiler takes a kernel. Run as a program, this file compiles and prints
one JSON object; the tests start it once per architecture, with the interpreter off.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ARCHITECTURES = {90: 232448, 100: 232448, 103: 232448, 120: 101376}
MEASURED = 90
H, I, K, E, E_LOCAL, EP = 4096, 2048, 8, 288, 72, 4


def jobs(arch: int) -> dict:
    """name -> (kernel, {argument: type or constexpr value}, num_warps, num_stages)."""
    import torch

    from epmoe.core.packed_rows import RowLayout
    from epmoe.core.routing import RouterConfig
    from epmoe.fused_triton.kernels import (
        DeviceLimits,
        GemmConfig,
        choose,
        dispatch,
        gemm,
        gemm_kernels,
        metadata,
        reduce,
        router,
    )

    row = RowLayout(H, K, torch.bfloat16)
    items, words = row.row_bytes // 2, row.row_bytes // 4
    place = {"H": H, "K": K, "ITEMS": items, "WORDS": words}
    config = RouterConfig(scoring="sigmoid", groups=8, topk_groups=4, scale=2.5)
    rule = router.compile_time_rule(config, E, K, True)
    ids = {"E_LOCAL": E_LOCAL, "K": K, "WORDS": words, "BINS": 128}
    limits = DeviceLimits(ARCHITECTURES[arch], tma=True)

    def gemm_job(which: str, rows: int, **changes):
        sizes = {"hidden": H, "intermediate": I, "local_experts": E_LOCAL, "itemsize": 2}
        config: GemmConfig = getattr(choose(limits, rows=rows, **sizes), which)
        return gemm_of(which, GemmConfig(**{**config.to_dict(), **changes}))

    def gemm_of(which: str, config: GemmConfig):
        meta = gemm.compile_time(config, config.tma)
        warps, stages = meta.pop("num_warps"), meta.pop("num_stages")
        meta |= {"H": H, "I": I, "K": K, "TMA": config.tma}
        w = f"tensordesc<bf16[{config.block_n}, {config.block_k}]>" if config.tma else "*bf16"
        meta["TMA_ROWS"] = config.tma_rows
        operand = "x_ptr" if which == "gate_up" else "h_ptr"
        if config.tma_rows:
            meta[operand] = f"tensordesc<bf16[{config.block_m}, {config.block_k}]>"
            meta["rest_ptr"] = (
                f"tensordesc<bf16[{config.block_r or config.block_m}, {config.block_k}]>"
            )
        if which == "gate_up":
            meta |= {"w_ptr": w, "ITEMS": items, "EXPERT_ROWS": 2 * I}
            return gemm_kernels.gate_up_kernel, meta, warps, stages
        meta |= {"w_ptr": w, "WORDS": words, "EXPERT_ROWS": H}
        return gemm_kernels.down_kernel, meta, warps, stages

    group = {"BLOCK_M": 16, "BLOCK_S": 16, "BLOCK_N": 2048, "BLOCK_C": 4096, "MOST": 8192}
    split = {"tma": True, "tma_rows": True, "block_m": 128, "block_r": 64}
    split |= {"num_stages": 3, "block_k": 32}  # fits the smallest shared memory here
    pack = {
        **place,
        **rule,
        "ID_WORD": row.slots_at // 4,
        "ROUTE": True,
        "EP": EP,
        "DESTS": 1,
        "BLOCK_H": 4096,
    }
    shipped = {
        f"{which}_{key}": gemm_of(which, GemmConfig(**json.loads(text)))
        for which in ("gate_up", "down")
        for key, text in enumerate(shipped_tiles(which) if arch == MEASURED else ())
    }
    return shipped | {
        "route": (router._route_kernel, rule, 1, 1),
        "route_pack": (dispatch._route_pack_kernel, pack, 4, 1),
        "prepare": (dispatch._prepare_kernel, {**place, "WEIGHT_WORDS": words, "BLOCK_H": 4096, "BLOCK_K": 8}, 4, 1),
        "group": (metadata._group_kernel, {**ids, **group}, 8, 1),
        "count": (metadata._count_kernel, {**ids, "BLOCK": 256}, 4, 1),
        "place": (
            metadata._place_kernel, {**ids, "BLOCK_M": 128, "BLOCK": 256, "SUB": 128, "ROWS": 128}, 8, 1,
        ),
        "gate_up_decode": gemm_job("gate_up", 8),
        "gate_up_swap_tma": gemm_job("gate_up", 8, swap_ab=True, tma=True, block_n=64, block_k=64),
        "gate_up_prefill": gemm_job("gate_up", 16384),
        "gate_up_prefill_rest": gemm_job("gate_up", 65536, **split),
        "down_prefill_rest": gemm_job("down", 65536, **split),
        "gather": (dispatch._gather_kernel, {**place, "ROWS": 4, "BLOCK_H": 2048}, 4, 1),
        "down_decode": gemm_job("down", 8),
        "down_prefill_tma": gemm_job("down", 16384, tma=True, tma_rows=True),
        "reduce": (reduce._reduce_kernel, {**place, "BLOCK_H": 512}, 4, 1),
        "merge": (reduce._merge_kernel, {"EP": EP, "H": H, "RING": False, "BLOCK_H": 512}, 4, 1),
    }  # fmt: skip


def shipped_tiles(which: str) -> list[str]:
    """Every different tile of `configs/`, as JSON: what a lookup returns on the GPU that they were measured on."""
    folder = Path(__file__).parents[1] / "epmoe/fused_triton/configs"
    entries = [e for file in folder.glob("*.json") for e in json.loads(file.read_text())["entries"]]
    return list(dict.fromkeys(json.dumps(entry[which], sort_keys=True) for entry in entries))


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack (where spills go), as the assembler put them into the binary."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    assert found, said.stdout
    return {"registers": int(found[1]), "stack": int(found[2])}


def argument_type(name: str) -> str:
    """Pointers by what they point to, everything else int32."""
    if not name.endswith("_ptr"):
        return "i32"
    floats = (
        "weights_ptr",
        "bias_ptr",
        "send_float_ptr",
        "recv_weights_ptr",
        "rows_ptr",
        "ret_ptr",
        "back_ptr",
    )
    halves = (
        "x_ptr",
        "logits_ptr",
        "send_x_ptr",
        "recv_x_ptr",
        "h_ptr",
        "w_ptr",
        "rest_ptr",
        "y_ptr",
    )
    return "*fp32" if name in floats else "*bf16" if name in halves else "*i32"


def compile_one(kernel, given: dict, warps: int, stages: int, arch: int, pdl: bool) -> dict:
    """Registers, spills and shared memory of one compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = {**given, "PDL": pdl}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = given.get(name, argument_type(name))
        if name.isupper() and name in given:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = value
            if value.startswith("*"):
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": pdl}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"shared": built.metadata.shared, "cubin": built.asm["cubin"], "ptx": built.asm["ptx"]}


def main(arch: int) -> None:
    found = {}
    for name, (kernel, given, warps, stages) in jobs(arch).items():
        built = compile_one(kernel, given, warps, stages, arch, pdl=True)
        ptx = built["ptx"]
        found[name] = {
            **resources(built["cubin"]),
            "shared": built["shared"],
            "bytes": len(built["cubin"]),
            "waits": ptx.count("griddepcontrol.wait"),
            "wide_copies": ptx.count("cp.async.cg") + ptx.count("cp.async.bulk"),
            "tensor_core": ptx.count("mma.sync")
            + ptx.count("wgmma.mma")
            + ptx.count("tcgen05.mma"),
        }
    print(json.dumps(found))


@pytest.mark.timeout(420)
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
def test_every_kernel_compiles(arch, tmp_path, record_property):
    """Also reports what each takes of a multiprocessor: the table stands at the end of the run.

    Nothing that decode runs spills anywhere; on the measured architecture nothing does, but for a tile that is cut down
    to the least shared memory. Tiles for long prefills spill where nobody has tuned them yet, as the table shows.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run(
        [sys.executable, __file__, str(arch)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    lines = [f"sm_{arch}: registers, stack, shared memory of {len(found)} kernels"]
    lines += [
        f"  {name:24}{kernel['registers']:4}{kernel['stack']:5}{kernel['shared']:8}"
        for name, kernel in found.items()
    ]
    record_property("table", "\n".join(lines))
    for name, kernel in found.items():
        assert kernel["bytes"] > 1000, name
        excused = name.endswith("_rest") or (arch != MEASURED and "prefill" in name)
        assert kernel["stack"] == 0 or excused, f"{name} spills"
        assert kernel["shared"] <= ARCHITECTURES[arch], (
            f"{name}: {kernel['shared']} bytes of shared memory"
        )
        assert kernel["waits"] >= 1, f"{name} never waits for its predecessor"
        if name.startswith(("gate_up", "down")):
            assert kernel["tensor_core"], f"{name} does not use the tensor cores"
            assert kernel["wide_copies"], (
                f"{name} does not load its tiles with wide asynchronous copies"
            )


if __name__ == "__main__":
    assert Path(__file__).name == "test_compile.py"
    main(int(sys.argv[1]))
