"""The notebook that a reader downloads: outputs stripped, Markdown that any notebook program shows."""

import re
from pathlib import Path

import nbformat
from nbformat import NotebookNode

_SNIPPET = re.compile(r'^--8<-- "([^":]+)(?::([\w-]+))?"$', re.MULTILINE)
_ADMONITION = re.compile(
    r'^(?:!!!|\?\?\?\+?) (\w+)(?: "([^"]*)")?\n((?:(?: {4}.*)?\n?)+)', re.MULTILINE
)
_FIRST = """\
# Needs the project: the walkthrough runs its real code.
#   git clone <the repository>; cd epmoe; make setup
#   .venv/bin/pip install jupyterlab; .venv/bin/jupyter lab
# Put this notebook anywhere inside the clone, for example beside the stage's walkthrough.py.
import epmoe.core"""


def to_notebook(notebook: NotebookNode, root: Path, snippets: Path | None = None) -> str:
    """JSON of the notebook. Code that the page includes is filled in; admonitions become quotes."""
    made = nbformat.v4.new_notebook(metadata={"kernelspec": _kernel()})
    first = nbformat.v4.new_code_cell(_FIRST, id="first")
    made.cells = [first]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = portable(cell.source, root, snippets or root / ".cache" / "snippets")
            made.cells.append(nbformat.v4.new_markdown_cell(text, id=cell["id"]))
        else:
            made.cells.append(nbformat.v4.new_code_cell(cell.source, id=cell["id"]))
    return nbformat.writes(made) + "\n"


def portable(text: str, root: Path, snippets: Path) -> str:
    """Markdown without what only the site understands."""
    text = _SNIPPET.sub(lambda m: _included(m, root, snippets), text)
    text = re.sub(r"^```\{ \.(\w+)[^}]*\}", r"```\1", text, flags=re.MULTILINE)
    text = _ADMONITION.sub(_quote, text)
    text = re.sub(r"\]\((\.\./[\w/]+)\.md(?:#[\w-]+)?\)", r"](\1.ipynb)", text)
    text = re.sub(r"\]\(\.\./\.\./([\w/-]+\.md)\)", r"](../../docs/\1)", text)
    return re.sub(r"\{ [.#][^}]*\}", "", text)


def _included(match: re.Match[str], root: Path, snippets: Path) -> str:
    from docs_hooks.markdown import region_lines

    name, region = match.groups()
    path = next((p / name for p in (root, snippets) if (p / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"a notebook cell includes {name}, which is not there")
    import textwrap

    return textwrap.dedent("\n".join(region_lines(path, region)))


def _quote(match: re.Match[str]) -> str:
    kind, title, body = match.groups()
    lines = [line.removeprefix("    ") for line in body.strip("\n").splitlines()]
    quoted = "\n".join(f"> {line}".rstrip() for line in lines)
    return f"> **{title or kind.capitalize()}**\n>\n{quoted}\n\n"


def _kernel() -> dict[str, str]:
    return {"display_name": "Python 3", "language": "python", "name": "python3"}
