"""`epmoe bench` on a GPU: graphs, events, the streaming kernel and vLLM's experts, at a small shape."""

import pytest
import torch

from epmoe.core.bench.results import load, validate
from epmoe.core.bench.run import Config, run
from epmoe.core.groups import single

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def config(**changes):
    usual = {"shape": "qwen3-moe-30b", "ep": 4, "loopback": True, "tokens": (1, 8), "layers": 2}
    return Config(**{**usual, "draws": 2, "blocks": 4, "replays": 10, **changes})


def test_subjects_in_graphs_from_logits_to_a_valid_result(tmp_path):
    names = ("02_fixed_capacity", "03_fused_triton", "grouped_mm")
    path = tmp_path / "r.json"
    result = run(single("cuda"), config(subjects=names, path=path))
    assert validate(result) == []
    assert load(path).points == result.points
    assert result.setting["clock"] == "CUDA events"
    assert result.ceiling["read_bytes_per_second"] > 1e12
    for point in result.points:
        assert {n: m.error for n, m in point.subjects.items()} == dict.fromkeys(names)
        assert {m.mode for m in point.subjects.values()} == {"graph"}
        assert all(m.over_ceiling[0] > 0.5 for m in point.subjects.values())


@pytest.mark.vllm
def test_vllm_runs_at_its_defaults_and_tuned():
    pytest.importorskip("vllm", reason="needs vLLM 0.32")
    names = ("vllm-default", "vllm-tuned")
    result = run(single("cuda"), config(subjects=names, tokens=(8,), sweep=3))
    point = result.points[0]
    assert {n: m.error for n, m in point.subjects.items()} == dict.fromkeys(names)
    assert point.refused == {}
    tuned = result.tuning["8"]
    assert tuned["best"] == point.subjects["vllm-tuned"].describe["config"]
    assert not set(tuned["draw_seeds"]) & {d.seed for d in point.draws}
