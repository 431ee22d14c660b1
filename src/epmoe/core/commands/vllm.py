"""`epmoe vllm`: found through the entry-point group `epmoe.commands`, since core imports no stage."""

from importlib.metadata import entry_points

import typer

from epmoe.core.errors import UnsupportedError

GROUP, NAME = "epmoe.commands", "vllm"


def app() -> typer.Typer:
    """The plugin's own sub-commands; where this installation is older than they are, one that says so."""
    found = entry_points(group=GROUP, name=NAME)
    return next(iter(found)).load() if found else _missing()


def _missing() -> typer.Typer:
    stand_in = typer.Typer(help="Not in this installation: install the package again.")

    @stand_in.callback(invoke_without_command=True)
    def tell() -> None:
        raise UnsupportedError(
            f"no entry point {NAME} in {GROUP}: install this package again (pip install -e .)"
        )

    return stand_in
