"""Where the tests find vLLM: its own environment, which CI makes; without it they skip, saying how to get it."""

import importlib.util
import os
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
def warm_python(vllm_python, tmp_path_factory) -> str:
    """The same, with vLLM imported: for tests that are about what runs in it, not about its start."""
    spec = importlib.util.spec_from_file_location(
        "warm_python", Path(__file__).with_name("warm_python.py")
    )
    assert spec is not None
    assert spec.loader is not None
    warm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(warm)
    base, keeper = tmp_path_factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:  # all workers share one: the controller is their parent
        base, keeper = base.parent, os.getppid()
    folder = base / "warm"
    folder.mkdir(exist_ok=True)
    return warm.write_program(folder / f"python-{os.getpid()}", vllm_python, keeper)


@pytest.fixture(scope="session")
def tiny_model() -> str:
    return str(Path(__file__).resolve().parents[3] / "models" / "tiny-glm-moe")
