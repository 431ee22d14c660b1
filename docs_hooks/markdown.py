"""A notebook with outputs as one page of Material Markdown, and what all pages share: figures and code by region."""

import html
import re
from pathlib import Path

from nbformat import NotebookNode

# the seven colours of epmoe.core.figures -> the site's own, which know light and dark
COLOURS = {
    "#ffffff": "var(--fig-paper)",
    "#1d2330": "var(--fig-ink)",
    "#667085": "var(--fig-muted)",
    "#c4cad4": "var(--fig-faint)",
    "#2b6cd9": "var(--fig-blue)",
    "#c96a10": "var(--fig-orange)",
    "#c2334d": "var(--fig-red)",
}
_REGION = re.compile(r'```python\n--8<-- "(?P<path>[^":]+)(?::(?P<region>[\w-]+))?"\n```')
_DIFF = re.compile(r'```diff\n--8<-- "(?P<path>diff/[^"]+)"\n```')


def to_markdown(notebook: NotebookNode, script: Path, root: Path) -> str:
    """The page `stages/NN_name/walkthrough.md`: cells in order, outputs below their code, buttons below the title."""
    parts: list[str] = []
    figures = 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if "hide-cell" in tags:
            continue
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        if "hide-input" not in tags:
            parts.append(f"```{{ .python .wt-cell }}\n{cell.source}\n```")
        if "hide-output" in tags:
            continue
        for output in merge_streams(cell.outputs):
            figures += 1
            parts.append(_output(output, f"f{figures}"))
    stage = script.parent.name
    page = "\n\n".join(part for part in parts if part.strip()) + "\n"
    return link_code(_with_buttons(page, stage), f"stages/{stage}/walkthrough.md", root)


def _with_buttons(page: str, stage: str) -> str:
    title, _, rest = page.partition("\n")
    buttons = (
        f'[:material-notebook-outline: Notebook](walkthrough.ipynb){{ .md-button download="{stage}.ipynb" }} '
        f'[:material-language-python: Script](walkthrough.py.txt){{ .md-button download="{stage}.py" }} '
        "[:material-file-compare: What changed](changes.md){ .md-button } "
        "[:material-pencil-outline: Exercises](exercises.md){ .md-button }"
    )
    return f"{title}\n\n{buttons}\n{{ .wt-buttons }}\n{rest}"


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Neighbouring pieces of standard output as one: how they were cut is chance."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and output.name == "stderr":
            continue
        if output.output_type == "stream" and merged and merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output.copy())
    return merged


def _output(output: NotebookNode, prefix: str) -> str:
    if output.output_type == "stream":
        return fence(output.text.rstrip(), "{ .text .wt-output }")
    data = output.get("data", {})
    plain = data.get("text/plain", "")
    if "image/svg+xml" in data:
        label = re.sub(r"^<picture: (.*)>$", r"\1", plain, flags=re.DOTALL)
        return figure(data["image/svg+xml"], label, prefix)
    if "text/html" in data:
        return (
            f'<div class="wt-html" markdown="0">{"".join(data["text/html"].split(chr(10)))}</div>'
        )
    return fence(plain, "{ .text .wt-output }") if plain else ""


def fence(text: str, language: str) -> str:
    """A fenced block, with a fence that the text does not contain."""
    marks = "```"
    while marks in text:
        marks += "`"
    return f"{marks}{language}\n{text}\n{marks}"


def figure(svg: str, label: str, prefix: str, caption: str = "") -> str:
    """An SVG of matplotlib as a figure of the page: themed colours, its own ids, a label for those who cannot see."""
    svg = re.sub(
        r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->",
        "",
        svg,
        flags=re.S,
    )
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    for plain, themed in COLOURS.items():
        svg = svg.replace(plain, themed)
    wide = re.search(r'viewBox="0 0 ([\d.]+)', svg)
    attributes = f'role="img" aria-label="{html.escape(label, quote=True)}"'
    svg = re.sub(r'<svg\b([^>]*?)\swidth="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg\b([^>]*?)\sheight="[^"]*"', r"<svg\1", svg, count=1)
    svg = svg.replace("<svg", f"<svg {attributes}", 1)
    width = f' style="max-width:{float(wide.group(1)) * 1.34:.0f}px"' if wide else ""
    text = f"<figcaption>{html.escape(caption)}</figcaption>" if caption else ""
    body = re.sub(r"\s*\n\s*", " ", svg).strip()
    return f'<figure class="fig" tabindex="0" data-search-exclude{width}>{body}{text}</figure>'


def link_code(page: str, page_path: str, root: Path) -> str:
    """Give code that is included by region its file as a title, a link to the whole file, and its `# New:` lines."""

    def code(match: re.Match[str]) -> str:
        path, region = match["path"], match["region"]
        lines = region_lines(root / path, region)
        new = " ".join(str(n) for n, line in enumerate(lines, 1) if "# New:" in line)
        marked = f' hl_lines="{new}"' if new else ""
        body = match.group(0).replace("```python", f'```{{ .python title="{path}"{marked} }}', 1)
        return f"{body}\n\n{source_link(path, page_path)}"

    def diff(match: re.Match[str]) -> str:
        return match.group(0).replace("```diff", "```{ .diff .wt-diff }", 1)

    return _DIFF.sub(diff, _REGION.sub(code, page))


def source_link(path: str, page_path: str) -> str:
    """A small link from a page to the page of a source file."""
    up = "../" * page_path.count("/")
    return f"[the whole file]({up}source/{path}.md){{ .source-link }}"


def region_lines(path: Path, region: str | None) -> list[str]:
    """Lines of a region as pymdownx.snippets shows them: markers of inner regions taken out."""
    lines = path.read_text().splitlines()
    if region:
        start = next((n for n, line in enumerate(lines) if f"[start:{region}]" in line), None)
        end = next((n for n, line in enumerate(lines) if f"[end:{region}]" in line), None)
        if start is None or end is None:
            raise ValueError(f"{path} has no region {region}")
        lines = lines[start + 1 : end]
    lines = [line for line in lines if "# --8<-- [" not in line]
    while lines and not lines[-1].strip():
        lines.pop()
    while lines and not lines[0].strip():
        lines.pop(0)
    return lines
