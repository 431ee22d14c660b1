"""Make the project's environment: a venv in .venv with pinned packages. Run by `make`, or by hand:

    python3.11 tools/setup_env.py [extra ...]        # default: dev

Needs Python >= 3.11 and pip, and uses whatever index pip is configured for. torch comes first: on a machine without an
NVIDIA GPU its CPU build where pip offers one (a plain wheel carries gigabytes of CUDA libraries), else the plain one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST = (3, 11)


def main(extras: list[str]) -> int:
    if sys.version_info < OLDEST:
        print(f"Python {sys.version.split()[0]} is too old: run this with Python 3.11 or newer")
        return 1
    python = make_venv()
    if not has_torch(python):
        install_torch(python)
    say(f"installing epmoe[{','.join(extras)}] with the versions of constraints.txt")
    pip(python, "install", "--constraint", str(CONSTRAINTS), "hatchling")
    target = f"{ROOT}[{','.join(extras)}]"
    pip(
        python,
        "install",
        "--no-build-isolation",
        "--constraint",
        str(CONSTRAINTS),
        "--editable",
        target,
    )
    for extra in extras:
        (VENV / f".ready-{extra}").touch()
    say(f"ready: {VENV}")
    return 0


def make_venv() -> Path:
    """The interpreter of .venv, made if it is missing or broken."""
    python = VENV / "bin" / "python"
    if works(python):
        return python
    say(f"making {VENV} with Python {sys.version.split()[0]}")
    make = [sys.executable, "-m", "venv", "--clear", str(VENV)]
    if subprocess.run(make, check=False).returncode:
        say("no ensurepip here: the environment gets its pip from this Python's")
        subprocess.run([*make, "--without-pip"], check=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(python), "install", "pip"], check=True
        )
    return python


def works(python: Path) -> bool:
    return python.exists() and subprocess.run([python, "-c", ""], check=False).returncode == 0


def pip(python: Path, *arguments: str) -> None:
    """Run pip in the environment; raises CalledProcessError after pip has said what is wrong."""
    command = [str(python), "-m", "pip", arguments[0], "-qq", *arguments[1:]]
    if arguments[0] == "install" and not sys.dont_write_bytecode:
        # Python compiles what it imports, once; compiling all would take a minute for files that nobody imports
        command.append("--no-compile")
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(command, check=True, env=environment)


def install_torch(python: Path) -> None:
    version = pinned("torch", CONSTRAINTS.read_text())
    for requirement, words in torch_candidates(version, has_gpu=has_gpu()):
        say(f"installing torch {version}: {words}")
        try:
            pip(python, "install", "--constraint", str(CONSTRAINTS), requirement)
            return
        except subprocess.CalledProcessError:
            say(f"no {requirement} to be had here")
    raise SystemExit(f"torch {version} could not be installed: see pip's messages above")


def torch_candidates(version: str, has_gpu: bool) -> list[tuple[str, str]]:
    """What to try, in order: (requirement, words). `==` also takes a local build such as +cpu, `===` does not."""
    if has_gpu:
        return [
            (f"torch==={version}", "the build with CUDA"),
            (f"torch=={version}", "any build"),
        ]
    return [
        (f"torch=={version}+cpu", "the CPU build (no NVIDIA GPU here), where pip offers it"),
        (f"torch=={version}", "the plain build, which may bring CUDA libraries"),
    ]


def pinned(name: str, constraints: str) -> str:
    """The version that a constraints file pins."""
    for line in constraints.splitlines():
        package, _, version = line.partition("==")
        if package.strip().lower() == name:
            return version.split(";")[0].strip()
    raise SystemExit(f"constraints.txt pins no {name}")


def has_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def has_torch(python: Path) -> bool:
    """True where the environment already holds the pinned version, whatever the build."""
    version = pinned("torch", CONSTRAINTS.read_text())
    code = "from importlib.metadata import version; print(version('torch'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip().split("+")[0] == version


def say(words: str) -> None:
    print(f"[setup] {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["dev"]))
