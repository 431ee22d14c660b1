"""Cases that run inside the Python that has vLLM: `python in_vllm.py OUT.json`. test_in_vllm.py starts it and judges.

Every `case_*` function is one test; all share one process, since importing vLLM takes longer than all of them.
"""

# pyright: reportMissingImports=false
import json
import sys
import traceback

import cases_layer
import cases_life
import cases_refused
from cases_bench import FIRST, Bench

from epmoe.vllm_plugin import bare, hook
from epmoe.vllm_plugin.settings import Settings


def main(out: str) -> None:
    hook.install(Settings(stage=FIRST))
    found = {}
    cases = {**vars(cases_layer), **vars(cases_life), **vars(cases_refused)}
    with bare.world(dp=1, tp=1, rank=0, device="cpu", max_tokens=32) as config:
        bench = Bench(config)
        for name, case in cases.items():
            if name.startswith("case_"):
                try:
                    case(bench)
                    found[name] = "right"
                except Exception:
                    found[name] = traceback.format_exc()
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
