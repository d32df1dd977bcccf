"""The order of imports, the size of files, and what the HTTP process must never load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "penstock"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Rooms may import rooms of a lower rank only; a room may always import itself.
RANK = {
    "": 0,  # penstock/__init__.py: the version
    "config": 0,
    "module_command": 0,
    "distribution": 0,
    "exit_codes": 0,
    "logging_setup": 0,
    "wire": 1,
    "telemetry": 1,
    "adapters": 2,
    "metrics": 2,
    "http": 2,
    "streaming": 3,
    "media": 3,
    "dispatch": 4,
    "engine": 4,
    "coordinator": 4,
    "store": 5,
    "generation": 6,
    "dialects": 7,
    "api": 8,
    "supervisor": 9,
    "client": 9,
    "gateway": 10,
    "placement": 10,
    "bench": 11,
    "cli": 12,
}
MAX_LINES = 700
MAX_FUNCTION_LINES = 60
"""Lines of code of a function, without its docstring."""
LONG_FUNCTIONS = {
    "penstock.api.process._build": 85,
    "penstock.engine.loop.process.__init__": 68,
    "penstock.engine.torch.cuda.kernels._attend": 120,
    "penstock.engine.torch.cuda.kernels._launch": 79,
    "penstock.engine.torch.engine.__init__": 97,
    "penstock.gateway.assembly.assemble": 104,
    "penstock.supervisor.main.serve": 77,
}
"""Functions that are longer, and their lines, which only become fewer: wiring, and kernels."""
MAX_ATTRIBUTES = 20
"""Attributes that ``__init__`` sets."""
COLUMNS = frozenset({"SlotTable", "EndpointColumns", "EngineStats", "HistoryIndex"})
"""Classes whose attributes are columns, or counters."""
WIDE_CLASSES = {
    "penstock.api.process._Server": 25,
    "penstock.engine.loop.process.EngineLoop": 24,
    "penstock.gateway.relay.attempt.Attempt": 26,
    "penstock.gateway.upstream.http2_connection.Http2UpstreamConnection": 27,
    "penstock.http.request.HttpRequest": 24,
}
"""Classes with more, which only become fewer."""


def room(module: str) -> str:
    """The room of a dotted module name, e.g. wire for penstock.wire.frames."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, of: str = "penstock") -> list[str]:
    """Dotted names of everything ``path`` imports from the package ``of``, at any depth."""
    names = []
    package = dotted(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{start}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] == of]


def test_every_room_has_a_rank() -> None:
    assert {room(dotted(path)) for path in MODULES} <= RANK.keys()


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_downwards(path: Path) -> None:
    own = room(dotted(path))
    wrong = [
        name
        for name in imports(path)
        if (other := room(name)) in RANK and other != own and RANK[other] >= RANK[own]
    ]
    assert not wrong, f"{dotted(path)} (rank {RANK[own]}) imports {wrong}"


API_ERRORS = frozenset({"http", "store", "generation", "dialects", "api", "supervisor", "gateway"})
"""Rooms that answer requests, or read them: what they refuse is a field and a status of the client's API.
Those below report faults of their own."""


def test_api_errors_are_raised_at_the_rim() -> None:
    importing = {
        room(dotted(path)) for path in MODULES for name in imports(path) if name.endswith(".errors.ApiError")
    }
    assert importing == API_ERRORS


def test_only_media_workers_import_vllm() -> None:
    """Its engines are processes of their own, of whatever version; its processor of pictures runs in ours."""
    importing = [dotted(path) for path in MODULES if imports(path, of="vllm")]
    assert importing == ["penstock.media.vllm_processor"]


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_file_is_too_long(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{path} has {lines} lines: it holds more than one idea"


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    taken = (first.end_lineno or 0) - first.lineno + 1 if docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - taken


def test_no_function_is_too_long() -> None:
    found = {
        f"{dotted(path)}.{node.name}": code_lines(node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > MAX_FUNCTION_LINES
    }
    assert found == LONG_FUNCTIONS


def attributes(init: ast.FunctionDef) -> set[str]:
    """Names that ``__init__`` gives to attributes of its object."""
    return {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_no_object_has_too_many_attributes() -> None:
    found = {
        f"{dotted(path)}.{node.name}": len(attributes(member))
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name not in COLUMNS
        for member in node.body
        if isinstance(member, ast.FunctionDef) and member.name == "__init__"
    }
    assert {name: count for name, count in found.items() if count > MAX_ATTRIBUTES} == WIDE_CLASSES


def test_a_public_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(dotted(path))
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("module", ["penstock.api.process", "penstock.supervisor.main"])
def test_host_processes_do_not_load_model_libraries(module: str) -> None:
    code = f"import {module}, sys; print(*sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""


def test_the_gateway_loads_nothing_that_reads_prompts() -> None:
    """Its workers relay bodies; model libraries, tokenizers and templates are the API servers'."""
    code = "import penstock.gateway.process, penstock.gateway.supervisor, sys; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = loaded.stdout.split()
    libraries = {"tokenizers", "fastokens", "jinja2", "llguidance", "torch", "transformers"}
    assert not libraries & set(modules)
    rooms = {room(module) for module in modules if module.startswith("penstock.")}
    assert not rooms & {"generation", "engine", "dispatch", "store", "api", "coordinator"}


MAX_MODULES = 22
"""Modules side by side in one folder; about 20 is the aim."""


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES}), ids=str)
def test_no_folder_is_too_full(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MAX_MODULES, f"{folder} has {len(modules)} modules side by side"


def steps() -> list[str]:
    """Every ``file.py:name`` of the call ladders in docs/architecture.md."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    return re.findall(r"`([\w/]+\.py:\w+)`", page)


def test_the_architecture_page_has_call_ladders() -> None:
    assert len(steps()) >= 20


@pytest.mark.parametrize("step", steps())
def test_every_step_of_a_call_ladder_exists(step: str) -> None:
    file, name = step.split(":")
    tree = ast.parse((PACKAGE / file).read_text())
    defined = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    assert name in defined | assigned


def test_paths_in_the_architecture_page_exist() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    paths = set(re.findall(r"`([\w/]+\.py)[:`]", page))
    assert {
        path for path in paths if not ((PACKAGE / path).exists() or (PACKAGE.parent / path).exists())
    } == set()
