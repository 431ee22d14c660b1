"""What becomes of a stage when vLLM loads weights again, starts another engine, or ends."""

# pyright: reportMissingImports=false
import gc
import json
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from cases_bench import FIRST, SMALL, by_hand, changed, inputs, names, near, refused, using

from epmoe.core import groups
from epmoe.core.weights import ExpertWeights, random_weights
from epmoe.vllm_plugin import bare, report
from epmoe.vllm_plugin import runner as runner_module

# ---- weights, again


def case_new_weights_in_the_old_place(bench):
    """vLLM can load new values while it serves: seen at once, and the layer is not built again."""
    x_TH, logits_TE = inputs()
    runner, fresh = bench.make(), random_weights(SMALL, range(8), seed=5)
    layer = runner.staged.layer
    bare.load(runner, fresh)
    assert runner.staged.layer is layer
    near(bench.call(runner, x_TH, logits_TE), by_hand(SMALL, fresh, x_TH, logits_TE))


def reload_as_vllm_does(runner, fresh: ExpertWeights) -> None:
    """vLLM's layerwise reload: tensors of the moment are loaded, then copied to where the first ones lie."""
    from vllm.model_executor.model_loader.reload import layerwise

    root, experts = torch.nn.ModuleList([runner]), runner.routed_experts
    layerwise.initialize_layerwise_reload(root)
    for expert in range(fresh.experts):
        gate_up_2IH, down_HI = fresh.w13_E2IH[expert], fresh.w2_EHI[expert]
        gate_IH, up_IH = gate_up_2IH[: fresh.intermediate], gate_up_2IH[fresh.intermediate :]
        for shard, tensor in {"w1": gate_IH, "w3": up_IH, "w2": down_HI}.items():
            parameter = experts.w2_weight if shard == "w2" else experts.w13_weight
            name = f"experts.{expert}.{shard}.weight"
            parameter.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)
    layerwise.finalize_layerwise_reload(root, None)


def case_a_reload_leaves_the_layer_where_graphs_know_it(bench):
    from vllm.model_executor.model_loader.reload import layerwise

    (x_TH, logits_TE), fresh = inputs(), random_weights(SMALL, range(8), seed=5)
    with using(count=True):
        runner = bare.make(bench.config, SMALL, torch.float32, name=next(names))
    layerwise.record_metadata_for_reloading(torch.nn.ModuleList([runner]))
    bare.load(runner, random_weights(SMALL, range(8)))
    staged = runner.staged
    layer, runs, owners = staged.layer, staged.runs, staged.layer.spec.tables.owner_E
    reload_as_vllm_does(runner, fresh)
    assert staged.layer is layer
    assert staged.runs is runs
    assert layer.spec.tables.owner_E is owners
    near(bench.call(runner, x_TH, logits_TE), by_hand(SMALL, fresh, x_TH, logits_TE))
    runner.routed_experts.w2_weight.data.zero_()
    assert not bench.call(runner, x_TH, logits_TE).any(), "the stage holds weights of its own"


def case_what_a_deep_sleep_gave_away_is_written_anew(bench):
    """Sleep level 2 keeps no memory that was taken while weights were loaded; a reload follows it."""
    (x_TH, logits_TE), weights = inputs(), random_weights(SMALL, range(8))
    runner = bench.make(weights=weights)
    tables = runner.staged.layer.spec.tables
    for table in (tables.owner_E, tables.slot_E, tables.owner_SE, tables.slot_SE):
        table.fill_(77)
    bare.load(runner, weights)
    near(bench.call(runner, x_TH, logits_TE), by_hand(SMALL, weights, x_TH, logits_TE))


def case_parameters_that_moved_for_good_are_followed(bench):
    (x_TH, logits_TE), fresh = inputs(), random_weights(SMALL, range(8), seed=5)
    runner = bench.make()
    before, experts = runner.staged.layer, runner.routed_experts
    experts.w13_weight.data, experts.w2_weight.data = fresh.w13_E2IH, fresh.w2_EHI
    near(bench.call(runner, x_TH, logits_TE), by_hand(SMALL, fresh, x_TH, logits_TE))
    assert before.closed


# ---- another engine


def case_other_variables_need_another_process(bench):
    """vLLM asks for its plugins once: a later engine would run, without a word, with what was set then."""
    held = os.environ["EPMOE_STAGE"]
    try:
        os.environ["EPMOE_STAGE"] = "01"
        refused(bench.make, "stage='01_variable_a2a' (was '02_fixed_capacity')", "start a new one")
        os.environ["EPMOE_STAGE"] = "native"
        refused(bench.make, "stage='native' (was '02_fixed_capacity')")
    finally:
        os.environ["EPMOE_STAGE"] = held
    bench.make()


# ---- the end


def case_the_last_report_has_layers_that_are_gone(bench):
    """vLLM drops its model, then its groups, then the process ends; what ran is in the file all the same."""
    with tempfile.TemporaryDirectory() as folder, changed(report, _runners=[], _ended=[]):
        assert report.write(folder) is None
        assert not list(Path(folder).iterdir()), (
            "a process without layers writes over somebody's file"
        )
        runner = bench.make()
        name = runner.layer_name
        for _ in range(3):
            bench.call(runner, *inputs())
        bench.config.compilation_config.static_forward_context.pop(name)
        del runner
        gc.collect()
        assert report.of_this_process()["layers"] == []
        with changed(runner_module, get_ep_group=None, get_tp_group=None):
            file = report.write(folder)
        assert file is not None
        (entry,) = json.loads(file.read_text())["layers"]
        assert (entry["layer"], entry["stage"], entry["calls"]) == (name, FIRST, 3)


def case_graphs_end_before_the_group_that_they_exchange_over(bench):
    """NCCL waits for the graphs that hold its collectives, and vLLM drops some of them only after its groups."""
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    order = []

    class Graph:
        def __init__(self, name):
            self.name, self.cycle = name, self  # what a graph has captured refers to it

        def __del__(self):
            order.append(self.name)

    class Coordinator:
        device_group = cpu_group = None

        def destroy(self):
            order.append("group")

    pieces = object.__new__(CUDAGraphWrapper)  # a whole one wants a GPU
    pieces.concrete_cudagraph_entries = {1: Graph("pieces")}
    CUDAGraphWrapper._all_instances.add(pieces)
    broken = object.__new__(BreakableCUDAGraphWrapper)
    broken.entries = {1: Graph("broken")}
    BreakableCUDAGraphWrapper._all_instances.add(broken)
    tensor, expert = Coordinator(), Coordinator()
    grid = SimpleNamespace(use_ep=True, ep_size=2)
    layer = SimpleNamespace(device="cpu", moe_parallel_config=grid)
    with (
        changed(runner_module, get_ep_group=lambda: expert, get_tp_group=lambda: tensor),
        changed(groups, join=lambda *_, **__: None),
    ):
        runner_module.shared_by_layers(layer)
        runner_module.shared_by_layers(layer)  # the next one shares it
    tensor.destroy()  # vLLM's order
    expert.destroy()
    assert sorted(order[:2]) == ["broken", "pieces"]
    assert order[2:] == ["group", "group"]
