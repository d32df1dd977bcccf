from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.media.local_files import read_local
from penstock.media.refused import Refused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "pictures"
    (directory / "deep er").mkdir(parents=True)
    (directory / "a.png").write_bytes(b"a picture")
    (directory / "deep er" / "b#%.png").write_bytes(b"another")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "pictures-of-others").mkdir()
    (tmp_path / "pictures-of-others" / "c.png").write_bytes(b"secret")
    return directory


def refused(url: str, root: Path, max_bytes: int = 100) -> str:
    with pytest.raises(Refused) as error:
        read_local(url, str(root), max_bytes)
    return f"{error.value.code}: {error.value.message}"


def test_files_of_the_directory(root: Path) -> None:
    assert read_local(f"file://{root}/a.png", str(root), 9) == b"a picture"
    assert read_local(f"FILE://localhost{root}/a.png", f"{root}/", 9) == b"a picture"
    assert read_local(f"file://{root}/deep%20er/b%23%25.png", str(root), 9) == b"another"
    assert read_local(f"file://{root}/deep%20er/../a.png", str(root), 9) == b"a picture"
    (root / "link.png").symlink_to("deep er/b#%.png")
    (root.parent / "way").symlink_to(root)
    assert read_local(f"file://{root}/link.png", str(root), 9) == b"another"
    assert read_local(f"file://{root.parent}/way/a.png", str(root.parent / "way"), 9) == b"a picture"


def test_nothing_is_told_of_other_files(root: Path) -> None:
    (root / "out.png").symlink_to("../secret")
    (root / "up").symlink_to("..")
    there = {
        refused(f"file://{root}/../secret", root),
        refused(f"file://{root}/%2e%2e/secret", root),
        refused(f"file://{root}/..%2fsecret", root),
        refused(f"file://{root}/out.png", root),
        refused(f"file://{root}/up/secret", root),
        refused(f"file://{root}-of-others/c.png", root),
        refused(f"file://{root}", root),
        refused("file:///etc/passwd", root),
        refused("file:///proc/self/environ", root),
        refused(f"file://{root}/../missing", root),
    }
    assert there == {"forbidden: the file is not in the directory of --allowed-local-media-path"}
    assert refused(f"file://{root}/missing.png", root).startswith("invalid: the server has no such file")


def test_only_regular_files_within_the_bound(root: Path) -> None:
    os.mkfifo(root / "pipe")
    assert refused(f"file://{root}/pipe", root) == "forbidden: the file is not a regular file"
    assert refused(f"file://{root}/deep%20er", root) == "forbidden: the file is not a regular file"
    assert refused(f"file://{root}/a.png", root, 8) == "too_large: the file has more than 8 bytes"
    # A file that claims to be empty.
    assert (
        refused("file:///proc/self/status", Path("/proc"), 8) == "too_large: the file has more than 8 bytes"
    )


@pytest.mark.parametrize(
    "url",
    [
        "file:a.png",
        "file:///a%00b",
        "file://host/a.png",
        "file:///a.png?x",
        "file:///a.png#x",
        "file://[::1/a",
    ],
)
def test_other_forms_are_refused(url: str, root: Path) -> None:
    assert refused(url, root).startswith("invalid: ")


def test_a_part_that_becomes_a_link_is_not_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its path was resolved, before it is opened."""
    resolve = os.path.realpath

    def race(path: bytes) -> bytes:
        found = resolve(path)
        if found.endswith(b"a.png"):
            (root / "a.png").unlink()
            (root / "a.png").symlink_to("../secret")
        elif found.endswith(b"#%.png"):
            (root / "deep er").rename(root / "gone")
            (root / "deep er").symlink_to(root.parent / "pictures-of-others")
            (root.parent / "pictures-of-others" / "b#%.png").write_bytes(b"secret")
        return found

    monkeypatch.setattr(os.path, "realpath", race)
    assert refused(f"file://{root}/a.png", root).startswith("invalid: the server has no such file")
    assert refused(f"file://{root}/deep%20er/b%23%25.png", root).startswith("invalid: the server has no such")
