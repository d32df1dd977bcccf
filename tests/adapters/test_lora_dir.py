"""Paths that requests name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.adapters.errors import AdapterError
from penstock.adapters.lora_dir import path_below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "loras"
    (root / "team" / "a").mkdir(parents=True)
    (root / "file").write_text("x")
    (tmp_path / "loras-secret").mkdir()
    return root


@pytest.mark.parametrize("given", ["team/a", "./team//a/", "team/./a"])
def test_relative_and_absolute_paths(root: Path, given: str) -> None:
    expected = str(root / "team" / "a")
    assert path_below(str(root), given) == expected
    assert path_below(str(root), f"{root}/{given}") == expected


def test_the_directory_may_be_a_link_and_be_named_by_either_path(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    for given in ("team/a", f"{link}/team/a", f"{root}/team/a"):
        assert path_below(str(link), given) == str(root / "team" / "a")


def test_links_inside_lead_to_their_real_path(root: Path) -> None:
    (root / "latest").symlink_to("team/a")
    assert path_below(str(root), "latest") == str(root / "team" / "a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "it must have 1 to 4096 characters"),
        ("a/" * 2049, "it must have 1 to 4096 characters"),
        ("a\0b", "it has a character that paths cannot have"),
        ("a\ud800", "it has a character that paths cannot have"),
        ("..", r"it must not contain '\.\.'"),
        ("team/../team/a", r"it must not contain '\.\.'"),
        ("team/a/../../../loras-secret", r"it must not contain '\.\.'"),
        (".", "it must lie below --lora-dir"),
        ("/", "it must lie below --lora-dir"),
        ("/etc", "it must lie below --lora-dir"),
        ("/does/not/exist", "it must lie below --lora-dir"),
        ("none", "No such file or directory"),
        ("x" * 300, "File name too long"),
        ("file", "it is not a directory"),
        ("file/a", "Not a directory"),
        ("out", "it must lie below --lora-dir"),
        ("out/etc", "it must lie below --lora-dir"),
        ("beside", "it must lie below --lora-dir"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_what_is_refused(root: Path, given: str, message: str) -> None:
    (root / "out").symlink_to("/")
    (root / "beside").symlink_to("../loras-secret")
    (root / "loop").symlink_to("loop")
    with pytest.raises(AdapterError, match=message):
        path_below(str(root), given)


def test_a_directory_beside_with_the_same_beginning(root: Path) -> None:
    with pytest.raises(AdapterError, match="it must lie below --lora-dir"):
        path_below(str(root), f"{root}-secret")


def test_without_the_directory(root: Path) -> None:
    with pytest.raises(AdapterError, match=r"--lora-dir .*none: No such file"):
        path_below(str(root / "none"), "a")


def test_a_link_to_a_directory_without_a_text_for_a_name(root: Path) -> None:
    try:
        (root / os.fsdecode(b"caf\xe9")).mkdir()
    except OSError:
        pytest.skip("the file system has UTF-8 names only")
    (root / "coffee").symlink_to(os.fsdecode(b"caf\xe9"))
    with pytest.raises(AdapterError, match="it is a link to a directory whose name is not UTF-8"):
        path_below(str(root), "coffee")
