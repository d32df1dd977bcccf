"""Children that are forked from a template, and those that are not, in a process of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from penstock.supervisor.children.child_starter import FORK_TIMEOUT_S, IMPORTS_TIMEOUT_S
from tests.supervisor.children.starts import MODULE
from tests.supervisor.harness import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    started = subprocess.Popen(
        [sys.executable, "-m", "tests.supervisor.children.starts"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = started.communicate(timeout=4 * PATIENCE_S)
    assert started.returncode == -signal.SIGKILL, errors
    found: dict[str, Any] = json.loads(output)
    return found | {"pid": started.pid, "errors": errors}


def test_a_forked_child_is_one_of_the_supervisor_with_its_own_descriptors_alone(seen: dict[str, Any]) -> None:
    first, other = seen["first"], seen["other"]
    assert (first["forked"], other["forked"]) == (True, True)
    assert first["parent"] == other["parent"] == seen["pid"]
    [*standard, channel, kept] = sorted(map(int, first["descriptors"].split()))
    assert standard == [0, 1, 2]
    assert seen["descriptors"][1] in (channel, kept)
    assert len(other["descriptors"].split()) == 4
    assert (first["stdin"], first["main"]) == (os.devnull, MODULE)
    assert first["threads"] == "MainThread orphan-guard"
    assert first["hash"] == other["hash"]


def test_its_end_reaches_the_supervisor(seen: dict[str, Any]) -> None:
    """The channel closes although a child was forked later."""
    assert seen["killed"] == [None, -signal.SIGKILL]
    assert seen["stopped"] == [None, 3]


def test_orphans_of_children_are_reaped(seen: dict[str, Any]) -> None:
    assert (seen["third"], seen["orphan is left"]) == (-signal.SIGKILL, False)


def test_without_a_template_children_are_executed(seen: dict[str, Any]) -> None:
    """It was killed, or could not import."""
    assert (seen["fourth"]["forked"], seen["fifth"]["forked"]) == (False, False)
    assert seen["fourth"]["parent"] == seen["fifth"]["parent"] == seen["pid"]
    assert "tests.no_such_module" in seen["errors"]


def test_children_are_forked_where_sigchld_was_ignored_and_with_many_descriptors(
    seen: dict[str, Any],
) -> None:
    assert (seen["ignoring"]["forked"], seen["many descriptors"]["forked"]) == (True, True)


def test_a_template_that_stops_holds_the_supervisor_for_seconds_only(seen: dict[str, Any]) -> None:
    took, child = seen["stopped template"]
    assert FORK_TIMEOUT_S <= took < IMPORTS_TIMEOUT_S / 2
    assert not child["forked"]


def test_a_template_with_an_environment_of_its_own_is_executed(seen: dict[str, Any]) -> None:
    code = "print(hash('seed'))"
    expected = subprocess.check_output(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": "7"}, text=True
    )
    assert seen["sixth"]["hash"] == int(expected)
    assert seen["sixth"]["parent"] == seen["pid"]
    assert "template_main" in seen["sixth"]["command"]


def test_forked_children_end_with_the_supervisor(seen: dict[str, Any]) -> None:
    try:
        stopped = psutil.Process(seen["stopped child"])
    except psutil.NoSuchProcess:
        return
    assert psutil.wait_procs([stopped], timeout=PATIENCE_S)[1] == []
