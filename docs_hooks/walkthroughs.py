"""Run the stages' walkthroughs and turn them into pages: a library, so that any site generator can call it.

    python -m docs_hooks.walkthroughs build/pages        # writes NN_name.md and NN_name.ipynb for every stage

A walkthrough is a jupytext script beside the stage's code. Its outputs are cached by everything that can change them:
the script, all code of the project, and the versions of what runs it.
"""

import hashlib
import importlib.metadata
import os
import platform
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from docs_hooks.markdown import to_markdown
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "walkthroughs"
CELL_SECONDS = 180
_RUNS_IT = ("torch", "triton", "numpy", "matplotlib", "jupytext", "nbclient", "ipykernel")


class WalkthroughError(RuntimeError):
    """A cell failed; the message names the page, the line of its script and the cell."""


def walkthroughs(root: Path = ROOT) -> list[Path]:
    """The scripts of all stages that have one, in ladder order."""
    return sorted(root.glob("stages/[0-9][0-9]_*/walkthrough.py"))


def execute(script: Path, cache: Path | None = CACHE) -> NotebookNode:
    """The notebook of `script` with its outputs. Raises WalkthroughError where a cell fails."""
    notebook = read(script)
    held = cache / f"{script.parent.name}-{key_of(script)}.ipynb" if cache else None
    if held and not held.is_file() and os.environ.get("EPMOE_DOCS_EXECUTE") == "cached":
        held = next(iter(held.parent.glob(f"{script.parent.name}-*.ipynb")), held)
    if held and held.is_file():
        return nbformat.read(held, as_version=4)
    _run(notebook, script)
    if held:
        held.parent.mkdir(parents=True, exist_ok=True)
        for stale in held.parent.glob(f"{script.parent.name}-*.ipynb"):
            stale.unlink()
        nbformat.write(notebook, held)
    return notebook


def read(script: Path) -> NotebookNode:
    """The notebook of `script`, not run."""
    notebook = jupytext.read(script, fmt="py:percent")
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type != "raw"]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{script.parent.name[:2]}-{number:03d}"  # stable: two builds are the same
    return notebook


def key_of(script: Path) -> str:
    """A digest of what the outputs depend on."""
    digest = hashlib.sha256(f"{platform.python_version()} {sys.platform}".encode())
    for name in _RUNS_IT:
        digest.update(f"{name} {_version(name)};".encode())
    code = [p for folder in ("src", "stages") for p in sorted((ROOT / folder).rglob("*.py"))]
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    mine = [p for p in code if p.name != "walkthrough.py"]
    for path in [script, Path(__file__), *mine, *results]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _run(notebook: NotebookNode, script: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="epmoe-docs-") as folder:
        # sockets in a folder of their own: the kernel's working directory is the stage's
        config = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/k"}})
        manager = AsyncKernelManager(kernel_name="python3", config=config)
        manager.kernel_spec.argv[0] = sys.executable
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=CELL_SECONDS,
            resources={"metadata": {"path": script.parent}},
        )
        try:
            client.execute(env=_environment(), cleanup_kc=True)  # the kernel ends with its notebook
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise WalkthroughError(_explain(notebook, script, error)) from error


def _environment() -> dict[str, str]:
    extra = {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "COLUMNS": "100"}
    return {**os.environ, **extra}


def _explain(notebook: NotebookNode, script: Path, error: Exception) -> str:
    """One paragraph: the page, the line, the cell, and the last lines of what went wrong."""
    started = [
        n
        for n, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and cell.get("execution_count")
    ]
    failed = next((n for n in started if _failed(notebook.cells[n])), started[-1] if started else 0)
    lines = [
        n for n, line in enumerate(script.read_text().splitlines(), 1) if line.startswith("# %%")
    ]
    where = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
    words = "\n".join(line for line in str(error).strip().splitlines()[-4:] if line.strip())
    return f"{where}:{lines[min(failed, len(lines) - 1)]}: cell {failed + 1} failed\n{words}"


def _failed(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def main(folder: Path) -> None:
    """Write every page and notebook into `folder`."""
    from docs_hooks.notebooks import to_notebook

    folder.mkdir(parents=True, exist_ok=True)
    for script in walkthroughs():
        notebook = execute(script)
        name = script.parent.name
        (folder / f"{name}.md").write_text(to_markdown(notebook, script, ROOT))
        (folder / f"{name}.ipynb").write_text(to_notebook(notebook, ROOT))
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/pages"))
