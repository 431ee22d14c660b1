"""One rank of one bare layer: `python -m epmoe.vllm_plugin.layer_program JOB.json FOLDER PARENT`.

Started by `layers`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epmoe.core import checkpoints
from epmoe.core.ranks import stacks
from epmoe.vllm_plugin import engines, report


def run(job: dict[str, Any], rank: int) -> tuple[Tensor, dict[str, Any]]:
    """(y [T, H] of this rank, the report). Collective."""
    from epmoe.vllm_plugin import bare

    info = checkpoints.inspect(job["model"])
    dtype, device = getattr(torch, job["dtype"]), job["device"]
    found = checkpoints.load_layer(info.path, job["layer"], dtype=dtype)
    bias_E = None if found.router.bias_E is None else found.router.bias_E.to(device)
    ranks = {"dp": job["dp"], "tp": job["tp"]}
    with bare.world(**ranks, rank=rank, device=device, max_tokens=job["max_tokens"]) as config:
        arguments: dict[str, Any] = (
            {"is_sequence_parallel": True} if job["sequence_parallel"] else {}
        )
        runner = bare.make(config, info.shape, dtype, bias_E, **arguments)
        bare.load(runner, found.experts.to(device))
        x_TH = torch.load(job["inputs"][rank // job["tp"]]).to(device)
        logits_TE = x_TH @ found.router.weight_EH.to(device).T
        mine = _mine(job, rank, len(x_TH))
        y_TH = bare.call(
            config,
            runner,
            x_TH[mine].to(dtype),
            logits_TE[mine],
            **({"tokens": len(x_TH)} if job["sequence_parallel"] else {}),
        )
        return y_TH.float().cpu(), report.of_this_process()


def _mine(job: dict[str, Any], rank: int, tokens: int) -> slice:
    """With sequence parallelism the model has cut the tokens before they reach the layer."""
    if not job["sequence_parallel"]:
        return slice(0, tokens)
    size, place = -(-tokens // job["tp"]), rank % job["tp"]
    return slice(place * size, (place + 1) * size)


def main(job_file: str, folder: str, parent: str) -> None:
    engines.end_with(int(parent))
    stacks.tell_on_request()
    rank, job = int(os.environ.get("RANK", 0)), json.loads(Path(job_file).read_text())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(job["port"]))
    y_TH, told = run(job, rank)
    torch.save(y_TH, Path(folder) / f"y-{rank}.pt")
    (Path(folder) / f"report-{rank}.json").write_text(json.dumps(told, default=str))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
