"""The command line's reference, read off the program: it cannot name an option that is not there."""

from typing import Any

import typer


def commands() -> str:
    """Markdown of every command."""
    from epmoe.core.cli import app

    return "\n\n".join(_command("epmoe", typer.main.get_command(app)))


def _command(name: str, command: Any) -> list[str]:
    if hasattr(command, "commands"):
        return [
            part for sub, one in command.commands.items() for part in _command(f"{name} {sub}", one)
        ]
    words = (command.help or "").strip()
    arguments = " ".join(p.name.upper() for p in command.params if p.param_type_name == "argument")
    parts = [f"## `{name}`", words, f"```bash\n{name} {arguments}".rstrip() + "\n```"]
    rows = [_option(p) for p in command.params if p.name not in ("help", "version")]
    if rows:
        parts.append("| option | default | what |\n|---|---|---|\n" + "\n".join(rows))
    return parts


def _option(option: Any) -> str:
    names = ", ".join(f"`{o}`" for o in (*option.opts, *option.secondary_opts))
    if option.param_type_name == "argument":
        names = f"`{option.name.upper()}`"
    default = option.default
    empty = default is None or default is False or default == () or callable(default)
    shown = "" if empty or "UNSET" in repr(default) else f"`{default}`"
    help_text = (getattr(option, "help", None) or "").replace("|", "\\|")
    return f"| {names} | {shown} | {help_text} |"
