"""One rank of one vLLM engine: `python -m epmoe.vllm_plugin.engine_program JOB.json FOLDER PARENT`.

Started by `engines.run`, with EPMOE_STAGE and vLLM's variables set; with several ranks as torchrun would start it. The
engine runs in this process, so that the report and a sabotage reach the model directly.
"""

# pyright: reportMissingImports=false
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from epmoe.core.bench.provenance import machine
from epmoe.core.ranks import stacks
from epmoe.vllm_plugin import engines, report
from epmoe.vllm_plugin.jobs import Answer, Job, check_expert

TOP = 5  # log-probabilities kept of each generated token


def run(job: Job, rank: int) -> Answer:
    """Start the engine, generate, tell. Collective where the job has several ranks."""
    import vllm

    started = time.perf_counter()
    llm = vllm.LLM(**arguments(job))
    start_seconds = time.perf_counter() - started
    requests = job.requests[rank // job.tp]
    prompts: list[Any] = [{"prompt_token_ids": request.ids} for request in requests]
    how = [
        vllm.SamplingParams(
            temperature=0,
            max_tokens=request.tokens,
            ignore_eos=True,
            logprobs=TOP,
            detokenize=False,
            seed=0,
        )
        for request in requests
    ]
    outputs = llm.generate(prompts, how, use_tqdm=False)
    seconds = [
        timed(lambda: llm.generate(prompts, how, use_tqdm=False)) for _ in range(job.repeats)
    ]
    found = [output.outputs[0] for output in outputs]
    told = report.of_this_process()
    spoilt_ids: list[list[int]] = []
    if job.sabotage is not None:
        expert = job.sabotage
        llm.apply_model(lambda model: spoil(model, expert))
        again = llm.generate(prompts, how, use_tqdm=False)
        spoilt_ids = [list(output.outputs[0].token_ids) for output in again]
    llm.llm_engine.engine_core.shutdown()  # where the engine has processes of its own, they end with it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Answer(
        ids=[list(one.token_ids) for one in found],
        spoilt_ids=spoilt_ids,
        logprobs=[[plain(step) for step in one.logprobs or []] for one in found],
        report=told,
        seconds=seconds,
        start_seconds=start_seconds,
        machine={**machine(device), "vllm": vllm.__version__},
    )


def arguments(job: Job) -> dict[str, Any]:
    """For vLLM's LLM. Prefix caching is off: with it, a repetition would not run the prompts."""
    found: dict[str, Any] = {
        "model": job.model,
        "dtype": job.dtype,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "enforce_eager": job.eager,
        "seed": 0,
        "tensor_parallel_size": job.tp,
    }
    if job.dp * job.tp > 1:
        found |= {
            "data_parallel_size": job.dp,
            "enable_expert_parallel": job.stage != "native" or torch.cuda.is_available(),
            "distributed_executor_backend": "external_launcher",
        }
    return found | job.engine


def spoil(model: torch.nn.Module, expert: int) -> int:
    """Turn the sign of one expert's down projection in every MoE layer, in the weights that vLLM holds; how many."""
    spoilt = 0
    for module in model.modules():
        if type(module).__name__ != "RoutedExperts":
            continue
        places: Any = module.expert_map
        check_expert(expert, len(module.w2_weight if places is None else places))  # pyright: ignore[reportArgumentType]
        slot = expert if places is None else int(places[expert])
        if slot >= 0:
            module.w2_weight.data[slot].neg_()  # pyright: ignore[reportIndexIssue, reportCallIssue]
            spoilt += 1
    return spoilt


def plain(step: Any) -> dict[str, float]:
    """vLLM's log-probabilities of one token as {token id: value}."""
    return {str(token): float(one.logprob) for token, one in step.items()}


def timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(job_file: str, folder: str, parent: str) -> None:
    engines.end_with(int(parent))
    stacks.tell_on_request()
    rank, job = int(os.environ.get("RANK", 0)), Job.load(job_file)
    run(job, rank).save(Path(folder) / f"answer-{rank}.json")
    sys.stdout.flush()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    os._exit(0)  # vLLM's threads and C++ destructors outlive a finished run now and then


if __name__ == "__main__":
    main(*sys.argv[1:])
