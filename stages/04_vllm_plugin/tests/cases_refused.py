"""What is refused, with which words; and the fallback, which has to be asked for."""

# pyright: reportMissingImports=false
import logging
from dataclasses import replace
from types import SimpleNamespace

import torch
from cases_bench import SMALL, changed, inputs, near, random_weights, refused, using

from epmoe.vllm_plugin import hook, report


def case_refusals(bench):
    """Each with vLLM's real objects; every reason in one message."""
    asked = {
        "activation gelu: only silu": {"activation": "gelu"},
        "swiglu_limit=7.0": {"swiglu_limit": 7.0},
        "the experts have a bias": {"has_bias": True},
        "apply_router_weight_on_input": {"apply_router_weight_on_input": True},
        "routed_input_transform": {"routed_input_transform": torch.nn.Identity()},
        "routed_output_transform": {"routed_output_transform": torch.nn.Identity()},
    }
    for words, arguments in asked.items():
        refused(lambda arguments=arguments: bench.make(**arguments), words, "EPMOE_FALLBACK=native")
    refused(
        lambda: bench.make(activation="gelu", has_bias=True),
        "activation gelu",
        "the experts have a bias",
    )


def case_refusals_of_configurations(bench):
    parallel, config = bench.config.parallel_config, bench.config
    with changed(parallel, enable_dbo=True):
        refused(bench.make, "--enable-dbo")
    with changed(parallel, pipeline_parallel_size=2):
        refused(bench.make, "pipeline parallelism (size 2)")
    with changed(parallel, data_parallel_size=2):
        refused(bench.make, "add --enable-expert-parallel")
    with changed(config, lora_config=SimpleNamespace()):
        refused(bench.make, "--enable-lora")


def case_what_the_stage_does_not_declare(bench):
    many = SMALL.with_(experts=1056, hidden=32, intermediate=32)
    with using(stage="03_fused_triton"):
        refused(lambda: bench.make(many, weights=()), "experts=1056 is over the limit of 1024")


def case_fallback_only_when_asked_and_said(bench):
    """With EPMOE_FALLBACK=native the layer computes what vLLM's does, warns once, and reports itself as native."""
    said, (x_TH, logits_TE), weights = [], inputs(), random_weights(SMALL, range(8))
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    hook.log.addHandler(handler)
    try:
        with using(fallback=True):
            runner = bench.make(weights=weights, activation="gelu")
        y_TH = bench.call(runner, x_TH, logits_TE)
        bench.call(runner, x_TH, logits_TE)
    finally:
        hook.log.removeHandler(handler)
    near(y_TH, bench.call(bench.native(weights=weights, activation="gelu"), x_TH, logits_TE))
    assert len(said) == 1, said
    assert "runs natively" in said[0], said
    told = [one for one in report.of_this_process()["layers"] if one["layer"] == runner.layer_name]
    assert told[0]["stage"] == "native", told
    assert "activation gelu" in told[0]["why"][0], told


def case_the_hook_is_taken_once(bench):
    from vllm.model_executor.custom_op import op_registry_oot

    held = op_registry_oot[hook.RUNNER]
    hook.install(hook.current())  # as when the entry point runs twice
    assert op_registry_oot[hook.RUNNER] is held
    refused(
        lambda: hook.install(replace(hook.current(), stage="01_variable_a2a")), "start a new one"
    )
    op_registry_oot[hook.RUNNER] = type("Other", (held,), {"__module__": "somebody"})
    try:
        refused(lambda: hook.install(hook.current()), "somebody.Other replaces MoERunner already")
    finally:
        op_registry_oot[hook.RUNNER] = held
