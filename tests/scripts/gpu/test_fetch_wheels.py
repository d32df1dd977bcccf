"""Which wheels are carried to a machine."""

from __future__ import annotations

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from scripts.gpu.fetch_wheels import PRESENT, missing, platforms
from scripts.gpu.machine import ROOT


def test_requirements_that_the_machine_lacks() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    names = [each.partition(">")[0] for each in missing(text, PRESENT)]
    first = ["httptools", "hpack", "wsproto", "msgspec", "orjson", "pyzmq", "fastokens"]
    assert names == [*first, "setproctitle", "llguidance", "cryptography"]
    assert missing('[project]\ndependencies = ["A_b.c>=1", "d"]', ["a-b-c"]) == ["d"]


def test_every_platform_of_a_wheel_is_named() -> None:
    tags = {Tag("cp39", "abi3", platform) for platform in platforms("x86_64", 35)}
    for end, runs in (("2_31", True), ("2_35", True), ("2_36", False), ("2014", True), ("1", True)):
        name = f"llguidance-1.9.1-cp39-abi3-manylinux{'_' if '_' in end else ''}{end}_x86_64.whl"
        assert bool(parse_wheel_filename(name)[3] & tags) == runs
