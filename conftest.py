"""The suite's options and fixtures, for whatever part of the tests is run."""

import os

import torch

if not torch.cuda.is_available():
    # Triton decides at its first import whether it compiles or interprets, and tests run kernels in this process too
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest_plugins = ["epmoe.core.conformance.plugin"]
