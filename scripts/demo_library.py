"""Docstrings and prose comments of Python's standard library, as (qualified name, text) pairs."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path

# fmt: off
SKIPPED_PARTS = {
    "site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "turtledemo", "ensurepip",
}
# fmt: on
"""Folders of the standard library whose text teaches little English."""

# fmt: off
RUNTIME_MODULES = (
    "builtins", "math", "time", "itertools", "_collections", "_functools", "_io", "_datetime", "_struct",
    "sys", "posix", "gc", "zlib", "select", "_socket", "_sqlite3", "unicodedata", "array", "_operator",
)
# fmt: on
"""Modules written in C: their docstrings are only there at run time."""

COMMENT_LINES = 3
"""A block of comments is taken from this many lines on."""
PROSE_SHARE = 0.88
"""A block of comments is taken when more than this share of it is letters and spaces."""


def read_library(root: Path) -> Iterator[tuple[str, str]]:
    """What `root` and the C modules of the running interpreter hold; comments have no name."""
    for path in library_files(root):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for name, text in docstrings(path):
            yield f"{module}.{name}".rstrip("."), text
        for text in comments(path):
            yield "", text
    yield from runtime_docstrings()


def library_files(root: Path) -> Iterator[Path]:
    """Python files of a standard library in a fixed order, without tests and installed packages."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not SKIPPED_PARTS.intersection(parts) and not parts[0].startswith("config-"):
            yield path


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """(qualified name within the module, docstring) of the module, its classes and functions."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    pending: list[tuple[str, ast.AST]] = [("", tree)]
    while pending:
        name, node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield name, text
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                pending.append((f"{name}.{child.name}".lstrip("."), child))


def comments(path: Path) -> Iterator[str]:
    """Blocks of comment lines that read as prose."""
    block: list[str] = []
    last_line = -1
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline))
    except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
        return
    for token in tokens:
        if token.type != tokenize.COMMENT or not token.line.lstrip().startswith("#"):
            continue
        if token.start[0] != last_line + 1:
            yield from _prose(block)
            block = []
        block.append(token.string.lstrip("#"))
        last_line = token.start[0]
    yield from _prose(block)


def _prose(block: list[str]) -> Iterator[str]:
    text = textwrap.dedent("\n".join(block)).strip()
    letters = sum(character.isalpha() or character == " " for character in text)
    if len(block) >= COMMENT_LINES and letters > PROSE_SHARE * len(text) and "copyright" not in text.lower():
        yield text


def runtime_docstrings() -> Iterator[tuple[str, str]]:
    """(name, docstring) of the public functions, classes and methods of `RUNTIME_MODULES`."""
    for module_name in RUNTIME_MODULES:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for name, thing in sorted(vars(module).items()):
            members = sorted(vars(thing).items()) if inspect.isclass(thing) else []
            for path, target in [(name, thing), *((f"{name}.{member}", value) for member, value in members)]:
                text = inspect.getdoc(target) if callable(target) else None
                if text and not path.rpartition(".")[2].startswith("_"):
                    yield path, text
