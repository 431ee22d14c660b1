"""The suite itself: faults that real layers had are found, and a stage of another package can run it."""

import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from epmoe.core import registry
from epmoe.core.cases import Case
from epmoe.core.conformance.plugin import judged
from epmoe.core.groups import EPGroup
from epmoe.core.layer import MoELayer
from epmoe.core.shape import MoEShape
from epmoe.core.verify import run_case

SHAPE = MoEShape(hidden=16, intermediate=24, experts=8, topk=2)


def wrong_expert(layer, x, ids, w):
    return layer(x, torch.where(ids >= 0, (ids + 1) % 8, ids), w)


def masked_is_the_last_expert(layer, x, ids, w):
    return layer(x, torch.where(ids < 0, 7, ids), w)


def weights_twice(layer, x, ids, w):
    return layer(x, ids, w * w)


def weights_in_half_precision(layer, x, ids, w):
    return layer(x, ids, w.bfloat16().float())


def duplicates_collapse(layer, x, ids, w):
    return layer(x, ids, torch.where((ids == ids[:, :1]).cumsum(1) == 2, 0.0, w))


def rows_left_unwritten(layer, x, ids, w):
    y, named = torch.empty_like(x), (ids >= 0).any(dim=1)
    y[named] = layer(x, ids, w)[named]
    return y


def strides_ignored(layer, x, ids, w):
    return layer(x.as_strided(x.shape, (x.shape[1], 1)), ids, w)


def input_changed(layer, x, ids, w):
    y = layer(x, ids, w)
    x.zero_()
    return y


def buffer_handed_out(layer, x, ids, w):
    kept = vars(layer).setdefault("kept", torch.zeros(64, x.shape[1]))[: len(x)]
    return kept.copy_(layer(x, ids, w))


def rows_swapped(layer, x, ids, w):
    return layer(x, ids, w).flip(0)


def result_not_contiguous(layer, x, ids, w):
    return layer(x, ids, w).T.contiguous().T


FAULTS = {
    wrong_expert: {},
    masked_is_the_last_expert: {"kind": "masked"},
    weights_twice: {},
    weights_in_half_precision: {},
    duplicates_collapse: {"kind": "duplicates"},
    rows_left_unwritten: {"kind": "masked"},
    strides_ignored: {"strided": True},
    input_changed: {},
    buffer_handed_out: {},
    rows_swapped: {},
    result_not_contiguous: {},
}


class Faulty(MoELayer):
    """A right layer behind a fault."""

    def __init__(self, spec, right, fault):
        super().__init__(spec)
        self.right, self.fault = right.factory(spec), fault

    def forward(self, x_TH, topk_ids_TK, topk_weights_TK, capacity):
        inner = self.right

        class Call:  # what a fault sees of the right layer
            def __call__(self, x, ids, w):
                return inner.forward(x, ids, w, capacity)

        call = vars(self).setdefault("call", Call())
        return self.fault(call, x_TH, topk_ids_TK, topk_weights_TK)


def run_faulty(group: EPGroup, case: Case, fault):
    right = registry.load(case.stage)
    faulty = replace(right, factory=lambda spec: Faulty(spec, right, fault))
    with patch.object(registry, "load", lambda name: faulty):
        return run_case(group, case)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(pool, fault):
    case = Case(stage="01", shape=SHAPE, tokens=((6, 9), (8, 4)), **FAULTS[fault])
    judged(pool.run(run_case, case, ranks=2))
    with pytest.raises(AssertionError, match="WRONG"):
        judged(pool.run(run_faulty, case, fault, ranks=2))


THEIRS = """
from dataclasses import replace
from epmoe.core import registry

right = registry.load("01_variable_a2a")
STAGE = replace(right, summary="somebody else's")
"""


def test_a_stage_of_another_package(tmp_path):
    """Registered by metadata alone, run with the command of the package's documentation; its own -k and options."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    metadata = tmp_path / "theirs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[epmoe.stages]\ntheirs = theirs:STAGE\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    command += ["--pyargs", "epmoe.core.conformance", "--stage", "theirs", "--ranks", "2"]
    done = subprocess.run(
        [*command, "-k", "12B or 1A"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs 4 ranks, this session has 2: raise --ranks" in done.stdout
    assert "4 passed, 1 skipped" in done.stdout, done.stdout


def test_other_people_keep_their_options(tmp_path):
    """A project with a --device option of its own is not disturbed by our entry point."""
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--device', default='theirs')\n"
    )
    (tmp_path / "test_theirs.py").write_text(
        "def test_device(request):\n    assert request.config.getoption('--device') == 'theirs'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
