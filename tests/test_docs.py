"""What the Markdown pages name exists: paths, links, modules to run. Generated pictures are fresh."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PICTURE = runpy.run_path(str(ROOT / "docs" / "make_architecture_picture.py"))
FOLDERS = ("benchmark", "cudnn_fused", "docs", "ptxemu", "tests", "tools")
FILES = tuple(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
PLACES = {f"/{path.relative_to(ROOT).as_posix()}" for path in (*FILES, *ROOT.iterdir())}
PAGES = sorted(path for path in (*FILES, *ROOT.iterdir()) if path.suffix == ".md")

IN_BACKTICKS = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./*-]+\.(?:py|md|toml|svg)")
FOLDER = re.compile(rf"(?:{'|'.join(FOLDERS)}|src)(?:/[\w.-]+)*/?")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"\bpython3? (?:-m ([\w.]+)|([\w./-]+\.py))")


def exists(place: str) -> bool:
    """Whether a path, or the end of one that is given without its first folders, is in the repository."""
    wanted = "/" + re.sub(r"^(\.\./)+", "", place).rstrip("/")
    return any(known.endswith(wanted) for known in PLACES)


def missing_paths(text: str) -> list[str]:
    """The paths in backticks that do not exist."""
    quoted = (word for span in IN_BACKTICKS.findall(text) for word in re.split(r"[\s,:(){}]+", span))
    paths = [word for word in quoted if FILE.fullmatch(word) or FOLDER.fullmatch(word)]
    return [path for path in paths if "*" not in path and not exists(path)]


def in_package(script: str) -> bool:
    """Whether a script is a module of a package, which its path would run without the package."""
    return (ROOT / script).with_name("__init__.py").exists()


def missing_commands(text: str) -> list[str]:
    """The scripts and the modules of this repository that commands name and that do not exist, or cannot be run so."""
    faults = []
    for module, script in COMMAND.findall(text):
        if script and (not exists(script) or in_package(script)):
            faults.append(script)
        if module.split(".")[0] in FOLDERS:
            place = module.replace(".", "/")
            if not exists(f"{place}.py") and not exists(f"{place}/__main__.py"):
                faults.append(module)
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    assert missing_paths(text) == []
    assert missing_commands(text) == []
    links = [link for link in LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_what_does_not_exist_is_found() -> None:
    assert missing_paths("see `cudnn_fused/nothing.py`, `plan.py`, `nowhere.py` and `tests/ptx/`") == [
        "cudnn_fused/nothing.py",
        "nowhere.py",
        "tests/ptx/",
    ]
    assert missing_commands("python -m benchmark.nothing\npython benchmark/measure.py\npython -m pytest") == [
        "benchmark.nothing",
        "benchmark/measure.py",
    ]


def test_the_picture_is_what_its_script_makes() -> None:
    assert PICTURE["PICTURE"].read_text() == PICTURE["render"](), "run python docs/make_architecture_picture.py"


def test_the_files_in_the_picture_exist() -> None:
    assert [file for stage in PICTURE["STAGES"] for file in stage.files if not exists(f"cudnn_fused/{file}")] == []
