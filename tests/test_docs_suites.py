"""The site's table of what was checked on GPUs."""

import json
import re

from docs_hooks import fact_stages


def test_of_several_runs_of_a_suite_the_fullest_stands(tmp_path, monkeypatch):
    def record(name: str, where: str, passed: int, **more) -> None:
        machine = {"device": "NVIDIA H200", "git_sha": "0123456789abcdef"}
        run = {"where": where, "machine": machine, "stages": {"02_x": {"passed": passed}}, **more}
        (tmp_path / f"benchmarks/results/suite-{name}.json").write_text(json.dumps(run))

    (tmp_path / "benchmarks/results").mkdir(parents=True)
    monkeypatch.setattr(fact_stages, "ROOT", tmp_path)
    record("a", "4 ranks share cuda:0 over NCCL", 9, checks={"collected": 9, "ended": 9})
    record("b", "4 ranks share cuda:0 over NCCL", 5)
    record("c", "2 ranks on cuda:0 to cuda:1", 3, checks={"collected": 9, "ended": 3})
    record("d", "8 ranks share cuda:0 to cuda:1 over NCCL", 7, checks={"collected": 7, "ended": 7})
    rows = [re.split(r" *\| *", line)[1:-1] for line in fact_stages.suite_table().splitlines()[2:]]
    assert rows == [
        ["`02_x`", "2 H200s", "0123456789ab", "in part", "3", "0", "0"],
        ["`02_x`", "4 ranks, one H200", "0123456789ab", "whole", "9", "0", "0"],
        ["`02_x`", "8 ranks, 2 H200s", "0123456789ab", "whole", "7", "0", "0"],
    ]
