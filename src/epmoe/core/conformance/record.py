"""What a run of the suite found, as JSON for benchmarks/results: where it ran; by stage, what passed, skipped, failed.

pytest --pyargs epmoe.core.conformance --device cuda --record benchmarks/results/suite-h200.json
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from epmoe.core.bench.provenance import machine

_WHERE = "epmoe_where"


@dataclass
class Recorder:
    """A pytest plugin that keeps the outcome of every check.

    With pytest-xdist (`-n 3`) the ranks live in the workers: each tells the controller where, and the controller, which
    sees every outcome, writes.
    """

    path: Path
    where: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    collected: int = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """pytest's hook: how many checks there are; a run that is cut short shows."""
        self.collected = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        """pytest-xdist's hook: every worker collects the same checks, the controller none."""
        self.collected = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """pytest's hook: a check counts once, by its call, or by its set-up where that ended it."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            self.reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """pytest-xdist's hook: a worker has ended, and says where its ranks were."""
        self.where = self.where or getattr(node, "workeroutput", {}).get(_WHERE, "")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """pytest's hook: write the file, failed or not."""
        told: dict[str, str] | None = getattr(session.config, "workeroutput", None)
        if told is not None:
            told[_WHERE] = self.where
            return
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        data = {
            "kind": "suite",
            "schema": 1,
            "machine": machine(device),
            "where": self.where,
            "checks": {"collected": self.collected, "ended": len(self.outcomes)},
            "stages": self._by_stage(),
            "skipped_because": dict(self.reasons.most_common()),
            "failed": sorted(
                name for name, outcome in self.outcomes.items() if outcome == "failed"
            ),
        }
        self.path.write_text(json.dumps(data, indent=1) + "\n")

    def _by_stage(self) -> dict[str, dict[str, int]]:
        counts: dict[str, Counter[str]] = {}
        for name, outcome in self.outcomes.items():
            stage = name.partition("[")[2].split("-")[0].rstrip("]") or "other"
            counts.setdefault(stage, Counter())[outcome] += 1
        return {stage: dict(found) for stage, found in sorted(counts.items())}
