"""The table of what is chosen where: `select` itself, asked about named situations."""

from functools import cache
from textwrap import indent

from docs_hooks.fact_tables import fact, markdown_table, measured_results

from epmoe.core.bench import remember
from epmoe.core.capabilities import Spec
from epmoe.core.commands.stages import alike, situation, weigh
from epmoe.core.measured import Comparison

H200 = {"device": "cuda", "arch": "9.0"}

SITUATIONS: dict[str, dict] = {
    "a laptop without a GPU, four ranks on it": {"device": "cpu", "ranks": 4},
    "one H200 with all experts, decode": {**H200, "ranks": 1, "graph": True},
    "one H200 that plays one of four ranks, decode": {**H200, "ranks": 4, "transport": "loopback"},
    "four GPUs, decode in CUDA graphs": {**H200, "ranks": 4, "graph": True},
    "two GPUs, a long prefill (T = 8192)": {**H200, "ranks": 2, "tokens": 8192},
    "the same with 2 GiB for buffers": {**H200, "ranks": 2, "tokens": 8192, "memory": "2GiB"},
    "the same in rounds of C = 2048": {**H200, "ranks": 2, "tokens": 2048, "memory": "2GiB"},
    "the same bits in every run": {**H200, "ranks": 4, "deterministic": True},
    "a token's bits independent of its batch": {**H200, "ranks": 4, "batch_invariant": True},
    "that on a CPU": {"device": "cpu", "ranks": 4, "batch_invariant": True},
    "replicated experts (EPLB)": {**H200, "ranks": 4, "placement": "replicated"},
    "vLLM, data parallel on eight GPUs": {**H200, "ranks": 8, "tokens": 64, "graph": True},
    "an old GPU (compute capability 7.5)": {
        "device": "cuda", "arch": "7.5", "dtype": "float16", "ranks": 1, "graph": True,
    },
    "that, a token's bits independent of its batch": {
        "device": "cuda", "arch": "7.5", "dtype": "float16", "ranks": 1, "batch_invariant": True,
    },
}  # fmt: skip


@fact
def choosing_table() -> str:
    """Situation, choice and what decided."""
    rows = []
    for name, found in _found().items():
        options = "".join(f", `{key}={value}`" for key, value in found["options"].items())
        chosen = f"`{found['chosen']}`{options}" if found["chosen"] else "nothing can"
        rows.append([name, chosen, found["by"] or "-"])
    return markdown_table(["situation", "choice", "decided by"], rows, 3)


@fact
def choosing_reasons() -> str:
    """For each situation, folded: the reasons against everything that was not chosen."""
    parts = []
    for name, found in _found().items():
        rows = [
            [", ".join(f"`{one}`" for one in names), "<br>".join(reasons)]
            for names, reasons in alike(found["reasons"])
        ]
        table = markdown_table(["not chosen", "because"], rows, 2)
        parts.append(f'??? note "{name}"\n\n' + indent(table, "    "))
    return "\n\n".join(parts)


@cache
def _found() -> dict[str, dict]:
    comparisons = committed()
    return {name: weigh(spec_of(asked), comparisons) for name, asked in SITUATIONS.items()}


def spec_of(asked: dict) -> Spec:
    """The situation on a machine that the site knows measurements of, if it is one."""
    spec = situation(**asked)
    name = "NVIDIA H200" if asked.get("arch") == H200["arch"] else None
    return Spec(**{**vars(spec), "device_name": name})


def committed() -> list[Comparison]:
    """What `epmoe bench --remember` would have kept of the committed results; the newest first."""
    newest = sorted(measured_results().values(), key=lambda result: result.created, reverse=True)
    return [one for result in newest for one in remember.comparisons(result)]
