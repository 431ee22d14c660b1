"""What mkdocs calls: a thin layer over the libraries beside it.

EPMOE_DOCS_EXECUTE=0 leaves the outputs of walkthroughs out, EPMOE_DOCS_EXECUTE=cached takes the last ones even where
code has changed since (for writing prose); EPMOE_DOCS_JOBS says how many run at once (2).
"""

import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from docs_hooks import diffs, facts, markdown, notebooks, stage_pages, walkthroughs  # noqa: E402
from mkdocs.exceptions import PluginError  # noqa: E402
from mkdocs.structure.files import File, InclusionLevel  # noqa: E402

SGLANG = ROOT / "stages" / "04_vllm_plugin" / "SGLANG.md"
SNIPPETS = ROOT / ".cache" / "snippets"
_FACT = re.compile(r"\{\{ *(\w+)(?:\((.*?)\))? *\}\}")


def on_config(config):
    """Diffs are written before any page can include one; stages and results join the navigation by themselves."""
    diffs.write(ROOT, SNIPPETS)
    config.watch += [
        str(ROOT / name) for name in ("stages", "examples", "includes", "docs_hooks", "benchmarks")
    ]
    for entry in config.nav:
        if "Stages" in entry:
            entry["Stages"] = [*entry["Stages"], *(_stage_nav(s) for s in diffs.stages(ROOT))]
        if "Use it" in entry and SGLANG.is_file():
            entry["Use it"] = [*entry["Use it"], {"In SGLang": "use/sglang.md"}]
        if "Results" in entry:
            made = sorted(p.relative_to(ROOT / "docs") for p in (ROOT / "docs/ladder").glob("*.md"))
            entry["Results"] = [*entry["Results"], *map(str, made)]
    return config


def _stage_nav(stage: Path) -> dict:
    at = f"stages/{stage.name}"
    pages = [f"{at}/index.md"]
    if (stage / "walkthrough.py").is_file():
        pages.append({"Walkthrough": f"{at}/walkthrough.md"})
    pages.append({"What changed": f"{at}/changes.md"})
    if (stage / "exercises" / "README.md").is_file():
        pages.append({"Exercises": f"{at}/exercises.md"})
    return {f"{stage.name[:2]} · {stage_pages.title_of(stage)}": pages}


def on_files(files, config):
    """Add every page and asset that code makes."""
    add = _Adder(files, config)
    for script, notebook in _run_all():
        stage = f"stages/{script.parent.name}"
        try:
            page = markdown.to_markdown(notebook, script, ROOT)
        except (OSError, ValueError) as error:
            raise PluginError(f"{stage}/walkthrough.py: {error}") from error
        add(f"{stage}/walkthrough.md", stage_pages.link_files(page, script.parent, ROOT))
        add(f"{stage}/walkthrough.ipynb", notebooks.to_notebook(notebook, ROOT, SNIPPETS))
        add(f"{stage}/walkthrough.py.txt", script.read_text())
    for stage in diffs.stages(ROOT):
        add(f"stages/{stage.name}/index.md", stage_pages.card(stage, ROOT))
        add(f"stages/{stage.name}/changes.md", stage_pages.changes_page(stage, ROOT))
        if (stage / "exercises" / "README.md").is_file():
            add(f"stages/{stage.name}/exercises.md", stage_pages.exercises_page(stage, ROOT))
    if SGLANG.is_file():
        add("use/sglang.md", SGLANG.read_text())
    for path in stage_pages.source_files(ROOT):
        name = f"source/{path.relative_to(ROOT)}.md"
        add(name, stage_pages.source_page(path, ROOT), InclusionLevel.NOT_IN_NAV)
    for name, data in facts.assets(ROOT).items():
        add(f"assets/data/{name}", json.dumps(data, separators=(",", ":")))
    return files


class _Adder:
    def __init__(self, files, config):
        self.files, self.config = files, config

    def __call__(self, name: str, content: str, inclusion=InclusionLevel.UNDEFINED) -> None:
        made = File.generated(self.config, name, content=content, inclusion=inclusion)
        self.files.append(made)


def _run_all():
    scripts = [s for s in walkthroughs.walkthroughs() if s.parent in diffs.stages(ROOT)]
    if os.environ.get("EPMOE_DOCS_EXECUTE") == "0":
        return [(script, walkthroughs.read(script)) for script in scripts]
    with ThreadPoolExecutor(int(os.environ.get("EPMOE_DOCS_JOBS", "2"))) as pool:
        runs = [pool.submit(walkthroughs.execute, script) for script in scripts]
    errors = [str(run.exception()) for run in runs if run.exception()]
    if errors:
        raise PluginError("walkthroughs failed:\n\n" + "\n\n".join(errors))
    return [(script, run.result()) for script, run in zip(scripts, runs, strict=True)]


def on_page_markdown(text, page, config, files):
    """Fill in {{ facts }}: figures, tables and numbers, each computed now; link code to its file."""
    name = page.file.src_uri
    if name.startswith(("source/", "stages/0", "stages/1")):
        return text

    def one(match: re.Match[str]) -> str:
        try:
            return facts.fact(match[1], match[2] or "")
        except Exception as error:
            raise PluginError(f"{name}: {match[0]} cannot be computed: {error!r}") from error

    text = _FACT.sub(one, text)
    try:
        return markdown.link_code(text, name, ROOT)
    except (OSError, ValueError) as error:
        raise PluginError(f"{name}: {error}") from error
