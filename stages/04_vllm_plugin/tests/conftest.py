"""Where the tests find vLLM: its own environment, which CI makes; without it they skip, saying how to get it."""

from pathlib import Path

import pytest

from epmoe.core.errors import UnsupportedError
from epmoe.vllm_plugin import engines

MAKE_IT = "vLLM is in no environment here: python tools/setup_vllm_env.py makes .venv-vllm (3.5 GB)"


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """An interpreter that has vLLM."""
    try:
        return engines.find_python()
    except UnsupportedError:
        pytest.skip(MAKE_IT)


@pytest.fixture(scope="session")
def tiny_model() -> str:
    return str(Path(__file__).resolve().parents[3] / "models" / "tiny-glm-moe")
