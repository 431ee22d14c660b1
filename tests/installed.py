"""Wheels, and environments that hold them and nothing of this checkout: for tests of what is installed.

Such an environment sees the dependencies of the one that runs the tests, but not its editable installation.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def attempt(
    *command: str | Path, cwd: Path, timeout: float = 100, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; paths of this checkout are kept out of its environment."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run(*command: str | Path, cwd: Path, timeout: float = 100, **environment: str) -> str:
    """Standard output of a command that must succeed; otherwise as `attempt`."""
    done = attempt(*command, cwd=cwd, timeout=timeout, **environment)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(project: Path, target: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target, cwd=project)
    (wheel,) = target.glob("*.whl")
    return wheel


def clean_environment(folder: Path, wheel: Path) -> Path:
    """Make an environment in `folder` with `wheel`; its bin folder. Other packages are seen through a .pth file."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", find, cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"
