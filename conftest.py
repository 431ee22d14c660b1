"""The suite's options and fixtures, for whatever part of the tests is run."""

import os

import torch

if not torch.cuda.is_available():
    # Triton decides at its first import whether it compiles or interprets, and tests run kernels in this process too
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["epmoe.core.conformance.plugin"]


def pytest_collection_modifyitems(items):
    """Files that say LONG = True begin first: one that a worker starts last keeps the other one waiting."""
    items.sort(key=lambda item: not getattr(getattr(item, "module", None), "LONG", False))


def pytest_terminal_summary(terminalreporter):
    """Tables that tests have recorded, wherever they ran."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, text in report.user_properties:
            if name == "table":
                terminalreporter.write_line(f"\n{text}")
