"""What is published: its name, the wheel and the source distribution."""

from __future__ import annotations

import re
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from penstock import __version__, distribution
from penstock.distribution import DISTRIBUTION, PUBLISHED, pip_install
from tests.packaging.conftest import ROOT, Built

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WRONG_NAME = re.compile(
    r"""pip3?\ install\b[^\n]*?[\ "'=]penstock(?![-\w./])   # the other project
        |(?<![-\w.])penstock\\?\[(?:torch|vllm|envoy|otel|kubernetes|ray|dev|…|\.\.\.)""",
    re.VERBOSE,
)
WRITTEN = {".md", ".py", ".toml", ".txt", ".yaml", ".yml", ".html", ".json", ".sh", ".service", ".tpl", ""}
DIRECTORIES = ("penstock", "docs", "deploy", "scripts", "tests", ".ci")


def written() -> list[Path]:
    """Every file of the tree that a person wrote."""
    inside = [path for name in DIRECTORIES for path in (ROOT / name).rglob("*")]
    return [
        path
        for path in (*ROOT.glob("[!.]*"), *inside)
        if path.is_file()
        and path.suffix in WRITTEN
        and "node_modules" not in path.parts
        and path.stat().st_size < 1_000_000
    ]


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PROJECT["name"] == DISTRIBUTION != "penstock"
    monkeypatch.setattr(distribution, "PUBLISHED", True)
    assert pip_install("torch", "otel") == f'pip install "{DISTRIBUTION}[torch,otel]"'
    monkeypatch.setattr(distribution, "PUBLISHED", False)
    assert pip_install("torch") == '.venv/bin/pip install ".[torch]" in a clone of Penstock'


@pytest.mark.skipif(PUBLISHED, reason="it is on PyPI")
def test_nothing_tells_to_install_what_is_not_published() -> None:
    told = re.compile(
        rf"(pip3? install|uv add)\b.*{DISTRIBUTION}|{DISTRIBUTION}\[|pypi\.org/project/penstock"
    )
    own = (Path(__file__), ROOT / "penstock" / "distribution.py")
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in written()
        if path not in own and (found := told.search(path.read_text(errors="replace")))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("pip install penstock", True),
        ("pip install -U 'penstock[torch]'", True),
        ("your image, with penstock[torch]", True),
        (pip_install("torch"), False),
        ("pip install jinja2 && penstock-llm serve", False),
        ("registry.example.com/penstock:0.1.0", False),
    ],
)
def test_the_other_projects_name_is_recognized(line: str, wrong: bool) -> None:
    assert bool(WRONG_NAME.search(line)) == wrong


def test_nothing_tells_to_install_the_other_project() -> None:
    files = [path for path in written() if path != Path(__file__)]
    assert len(files) > 500
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in files
        if (found := WRONG_NAME.search(path.read_text(errors="replace")))
    ]
    assert not wrong


def test_the_metadata_of_the_wheel(built: Built) -> None:
    found = metadata(built.wheel)
    assert (found["Name"], found["Version"]) == (DISTRIBUTION, __version__)
    assert found["Requires-Python"] == ">=3.11"
    classifiers = found.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= {*classifiers}
    assert found["License-Expression"] == "Apache-2.0"
    assert {*found.get_all("Provides-Extra", [])} == PROJECT["optional-dependencies"].keys()
    assert built.wheel.name == f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"


def test_the_wheel_holds_the_package_and_its_data_alone(built: Built) -> None:
    names = ZipFile(built.wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "penstock",
        f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info",
    }
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "penstock").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert package - {*names} == set()  # a new kind of data needs a line under package-data


def test_the_source_distribution_holds_what_the_tests_and_the_reader_need(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = {str(path.relative_to(ROOT)) for path in written()} - names
    assert not missing
    assert not [name for name in names if "__pycache__" in name]


def test_a_build_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they are; what Python makes of them does not count."""
    package = tmp_path / "penstock"
    (package / "wire" / "__pycache__").mkdir(parents=True)
    (package / "wire" / "messages.py").write_text("A = 1\n")
    monkeypatch.setattr(distribution, "__file__", str(package / "distribution.py"))
    made = distribution.build_id.__wrapped__
    first = made()
    assert re.fullmatch(rf"{re.escape(__version__)}\+[0-9a-f]{{16}}", first)
    (package / "wire" / "__pycache__" / "messages.pyc").write_bytes(b"x")
    assert made() == first
    moved = package.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(distribution, "__file__", str(moved / "distribution.py"))
    assert made() == first
    (moved / "wire" / "messages.py").write_text("A = 2\n")
    assert made() != first
