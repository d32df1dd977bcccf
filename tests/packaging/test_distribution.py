"""What is published: its name, the wheel and the source distribution."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from email.parser import Parser
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from penstock import __version__, distribution
from penstock.distribution import DISTRIBUTION, PUBLISHED, pip_install
from scripts import check_tag
from tests.packaging.conftest import ROOT, Built

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIST_INFO = f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"
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
    assert found["License-Expression"] == "Apache-2.0 AND PSF-2.0"
    licences = found.get_all("License-File", [])
    assert {*licences} == {"LICENSE", "NOTICE", "penstock/demo/LICENSE-PYTHON.txt"}
    with ZipFile(built.wheel) as archive:
        for name in licences:
            packed = archive.read(f"{DIST_INFO}/licenses/{name}")
            assert packed == (ROOT / name).read_bytes()
    assert {*found.get_all("Provides-Extra", [])} == PROJECT["optional-dependencies"].keys()
    assert built.wheel.name == f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"


def test_the_wheel_holds_the_package_and_its_data_alone(built: Built) -> None:
    names = ZipFile(built.wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"penstock", DIST_INFO}
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "penstock").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert package - {*names} == set()  # a new kind of data needs a line under package-data


def test_the_bill_of_materials_is_of_what_is_packed(built: Built) -> None:
    """PEP 770. Every file has its hash and licence, and nothing of another distribution is inside."""
    with ZipFile(built.wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist()}
    bill = json.loads(packed.pop(f"{DIST_INFO}/sboms/{DISTRIBUTION}.cdx.json"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    about = bill["metadata"]["component"]
    assert (about["name"], about["version"]) == (DISTRIBUTION, __version__)
    assert about["purl"] == f"pkg:pypi/{DISTRIBUTION}@{__version__}"
    assert about["licenses"] == [{"expression": PROJECT["license"]}]
    listed = {each["name"]: each for each in bill["components"]}
    files = {name: data for name, data in packed.items() if not name.startswith(DIST_INFO)}
    assert listed.keys() == files.keys()
    for name, data in files.items():
        assert listed[name]["hashes"] == [{"alg": "SHA-256", "content": sha256(data).hexdigest()}], name
        of_demo = name.startswith("penstock/demo/")
        assert listed[name]["licenses"] == [{"expression": PROJECT["license"] if of_demo else "Apache-2.0"}]
    assert str(ROOT) not in json.dumps(bill)


def test_the_wheel_that_pip_makes_has_the_bill(built: Built, tmp_path: Path) -> None:
    """pip asks for the metadata first, and then for a wheel with it."""
    with tarfile.open(built.source) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    code = (
        "from setuptools import build_meta; made = build_meta.prepare_metadata_for_build_wheel('made'); "
        "build_meta.build_wheel('wheel', metadata_directory='made/' + made)"
    )
    (tree / "made").mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (wheel,) = (tree / "wheel").iterdir()
    assert {*ZipFile(wheel).namelist()} == {*ZipFile(built.wheel).namelist()}


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= cited.keys()
    assert cited["version"] == __version__


@pytest.mark.skipif(not PUBLISHED, reason="it is not on PyPI")
def test_the_long_description_has_no_relative_links() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / PROJECT["readme"]).read_text())
    assert not [link for link in links if not link.startswith(("https://", "#"))]


def test_a_tag_is_built_and_published_without_a_secret() -> None:
    """One job builds and checks; the other one, which may publish, runs none of the repository's code."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads on as true
    assert workflow["permissions"] == {"contents": "read"}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert "permissions" not in build
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build"
    assert not [step for step in publish["steps"] if "run" in step or "checkout" in step["uses"]]
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yaml").read_text()
    commands = " ".join(step.get("run", "") for step in build["steps"])
    page = (ROOT / "docs" / "releasing.md").read_text()
    for command in ("SOURCE_DATE_EPOCH", "-m build", "twine check --strict", "scripts/check_tag.py"):
        assert command in commands
        assert command in page


@pytest.mark.parametrize(("tag", "problem"), [(f"v{__version__}", ""), ("v9.9.9", "penstock/__init__.py")])
def test_a_tag_is_checked(tag: str, problem: str) -> None:
    assert problem in " ".join(check_tag.problems(tag, "2026-01-02"))
    assert "CHANGELOG.md" in " ".join(check_tag.problems(tag, "2026-01-02"))  # it says "unreleased"


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
