"""Which stage runs, and how often it was called: asked from the worker itself, since a log line proves nothing.

In-process engines and `apply_model`: `of_this_process()`. Workers in other processes: `LLM.collective_rpc(of_worker)`
(vLLM wants VLLM_ALLOW_INSECURE_SERIALIZATION=1 to send a function), or EPMOE_REPORT=FOLDER and the files in it.
"""

import atexit
import contextlib
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_runners: "list[weakref.ref[Any]]" = []
_ended: list[
    dict[str, Any]
] = []  # layers that went since the last one was made: vLLM drops them before it ends


def add(runner: Any, tell: Callable[[], dict[str, Any]]) -> None:
    """A staged runner of this process, or one that fell back; it is listed as long as it lives.

    `tell` gives its entry once more when it goes, and must not hold it: what is written at the very end has it too.
    """
    _ended.clear()
    _runners.append(weakref.ref(runner))
    weakref.finalize(runner, _keep_last_words, tell).atexit = False


def _keep_last_words(tell: Callable[[], dict[str, Any]]) -> None:
    with contextlib.suppress(RuntimeError):  # torch's: the device may be gone, and counts with it
        _ended.append(tell())


def of_this_process() -> dict[str, Any]:
    """{"pid", "rank", "stage", "layers": one entry per MoE layer with its stage, `calls` and, where counted, `runs`}.

    `calls` are calls from Python: a captured CUDA graph is one, its replays are none. `runs` is counted on the device
    (with EPMOE_COUNT=1) and counts replays. Warm-up and dummy batches count like all others.
    """
    return _of([runner.epmoe_report() for ref in _runners if (runner := ref()) is not None])


def _of(layers: list[dict[str, Any]]) -> dict[str, Any]:
    from epmoe.vllm_plugin import hook

    ranks = {layer.pop("rank", 0) for layer in layers}
    return {
        "pid": os.getpid(),
        "rank": min(ranks, default=0),
        "stage": hook.active.stage if hook.active else "native",
        "layers": layers,
    }


def of_worker(worker: Any) -> dict[str, Any]:
    """The same, in the form that `LLM.collective_rpc` calls."""
    return of_this_process()


_kept: set[str] = set()


def keep_in(folder: str) -> None:
    """Write the report when this process ends; `tick` does it in between, since not every end is an orderly one."""
    if folder not in _kept:
        _kept.add(folder)
        atexit.register(write, folder)


def tick(folder: str | None, calls: int) -> None:
    """After call 1, 2, 4, 8, ... of a layer: write. Not in a graph capture, where nothing can be read."""
    if folder is None or calls & (calls - 1):
        return
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        write(folder)


def write(folder: str) -> Path | None:
    """Write FOLDER/rank-<r>.json, whole or not at all; None where this process has had no layer."""
    data = of_this_process()
    if not data["layers"]:
        data = _of([dict(one) for one in _ended])
    if not data["layers"]:
        return None
    target = Path(folder) / f"rank-{data['rank']}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(data, indent=2, default=str) + "\n")
    part.replace(target)
    return target
