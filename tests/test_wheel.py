"""The wheel carries every stage: built, installed in an empty environment, and used there from another folder.

That environment sees the dependencies of the one that runs the tests, but not its editable installation.
"""

import json
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.installed import build_wheel, clean_environment, run

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]

PARTS = [PYPROJECT["project"]["entry-points"][f"epmoe.{part}"] for part in ("exchanges", "experts")]

# runs in the clean environment; prints what it found there
PROBE = """
import importlib, json, pkgutil
from importlib.metadata import distribution
import epmoe, epmoe.core
from epmoe.core.registry import Stage, load, names, pairs

modules = [f"epmoe.core.{module.name}" for module in pkgutil.iter_modules(epmoe.core.__path__)]
found = [importlib.import_module(name).__file__ for name in modules]
stages = {}
for name in names():
    stage = load(name)
    assert isinstance(stage, Stage), (name, stage)
    package = distribution("epmoe").entry_points.select(group="epmoe.stages", name=name)
    stages[name] = importlib.import_module(next(iter(package)).module).__file__
print(json.dumps({
    "roots": list(epmoe.__path__), "files": found, "stages": stages,
    "pairs": [pair for pair in pairs() if isinstance(load(pair), Stage)],
    "version": distribution("epmoe").version,
}))
"""


def missing_from(wheel: Path, project: Path) -> list[str]:
    """Source files below any `epmoe` folder that the wheel lacks or holds with other bytes."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    missing = []
    for package in [project / "src" / "epmoe", *sorted(project.glob("stages/*/epmoe"))]:
        for path in sorted(package.rglob("*")):
            name = path.relative_to(package.parent).as_posix()
            if (
                path.is_file()
                and "__pycache__" not in path.parts
                and inside.get(name) != path.read_bytes()
            ):
                missing.append(name)
    return missing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory) -> Path:
    """The bin folder of an environment that holds the wheel."""
    return clean_environment(tmp_path_factory.mktemp("clean"), wheel)


def test_it_holds_every_source_file_and_nothing_else(wheel):
    assert missing_from(wheel, ROOT) == []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "epmoe/core/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"epmoe"}
    assert not [name for name in names if "/tests/" in name or "/exercises/" in name]


def test_every_stage_works_from_it(clean, tmp_path):
    found = json.loads(run(clean / "python", "-I", "-c", PROBE, cwd=tmp_path))
    assert set(found["stages"]) == set(PYPROJECT["project"]["entry-points"]["epmoe.stages"])
    hosts = PYPROJECT["tool"]["epmoe"]["hosts"]  # they have no layer of their own
    assert len(found["stages"]) == len(SOURCES) - 1 - len(hosts)
    assert len(found["pairs"]) + len(found["stages"]) == len(PARTS[0]) * len(PARTS[1])
    assert found["version"] == PYPROJECT["project"]["version"]
    home = clean.parent.resolve()
    for path in (*found["roots"], *found["files"], *found["stages"].values()):
        assert Path(path).resolve().is_relative_to(home), f"{path} is not from the wheel"


def test_its_command_runs(clean, tmp_path):
    assert "plan" in run(clean / "epmoe", "--help", cwd=tmp_path)


def test_a_stage_that_the_list_forgets_is_noticed(tmp_path):
    project = tmp_path / "project"
    for source in SOURCES:
        shutil.copytree(
            ROOT / source, project / source, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, project / name)
    text = (ROOT / "pyproject.toml").read_text()
    forgotten = f', "{SOURCES[-1]}"'
    assert forgotten in text
    (project / "pyproject.toml").write_text(text.replace(forgotten, ""))
    missing = missing_from(build_wheel(project, tmp_path / "wheel"), project)
    assert missing
    assert {name.split("/")[1] for name in missing} == {
        Path(SOURCES[-1]).parent.name.split("_", 1)[1]
    }
