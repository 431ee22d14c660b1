"""The cases of cases_*.py, run once in a Python that has vLLM and judged one by one."""

import ast
import json
import subprocess
from pathlib import Path

import pytest

from epmoe.vllm_plugin import engines

HERE = Path(__file__).resolve().parent
FILES = ("cases_layer.py", "cases_life.py", "cases_refused.py")
CASES = [
    node.name
    for file in FILES
    for node in ast.parse((HERE / file).read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def found(warm_python, tmp_path_factory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("vllm") / "found.json"
    port = str(engines.free_port())
    env = engines.environment("03_fused_triton", "cpu", {})  # with Triton's interpreter on
    env |= {"EPMOE_STAGE": "02", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [warm_python, str(HERE / "in_vllm.py"), str(out)],
        env=env,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert out.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", CASES)
def test_case(found, case):
    assert found[case] == "right"
