"""What pages may ask for between double braces: figures, tables and numbers, computed when the site is built.

    {{ figure(memory_floor) }}      a figure of `idea_figures`
    {{ expert_mb(glm-5.3-flash) }}  a number

An unknown name, or one that cannot be computed, fails the build and names the page.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from docs_hooks import (
    fact_choosing,  # noqa: F401  registers its own
    fact_parts,  # noqa: F401  registers its own
    fact_placements,  # noqa: F401  registers its own
    fact_reading,  # noqa: F401  registers its own
    fact_stages,  # noqa: F401  registers its own
    fact_tables,
    fact_traces,  # noqa: F401  registers its own
    idea_figures,
)
from docs_hooks.markdown import figure

ROOT = Path(__file__).resolve().parent.parent
_FACTS: dict[str, Callable[..., str]] = {**fact_tables.FACTS}


def fact(name: str, arguments: str) -> str:
    """The text that stands for {{ name(arguments) }}."""
    words = [word.strip() for word in arguments.split(",") if word.strip()]
    if name == "figure":
        picture, caption = idea_figures.draw(words[0])
        return figure(picture.svg(), picture.says, f"i-{words[0]}", caption)
    if name not in _FACTS:
        raise KeyError(f"no fact is called {name}: there are figure, {', '.join(sorted(_FACTS))}")
    return _FACTS[name](*words)


def assets(root: Path) -> dict[str, object]:
    """Name below assets/data -> JSON: the traces that the stepper plays, and what the explorer starts from."""
    from epmoe.core.traces.limits import explorer

    data: dict[str, object] = {"limits.json": explorer()}
    for name, trace in traces(root).items():
        data[f"traces/{name}"] = trace
    return data


def traces(root: Path) -> dict[str, dict]:
    """Traces of the present code; kept until a line of it changes."""
    digest = hashlib.sha256()
    for folder in ("src", "stages"):
        for path in sorted((root / folder).rglob("*.py")):
            if (
                "/tests/" not in str(path)
                and "exercises" not in path.parts
                and path.name != "walkthrough.py"
            ):
                digest.update(path.name.encode() + path.read_bytes())
    held = root / ".cache" / "traces" / f"{digest.hexdigest()[:16]}.json"
    if not held.is_file() and os.environ.get("EPMOE_DOCS_EXECUTE") == "cached":
        held = next(iter(held.parent.glob("*.json")), held)
    if held.is_file():
        return json.loads(held.read_text())
    from epmoe.core.traces import trace_everything

    found = trace_everything()
    held.parent.mkdir(parents=True, exist_ok=True)
    for stale in held.parent.glob("*.json"):
        stale.unlink()
    held.write_text(json.dumps(found, separators=(",", ":")))
    return found
