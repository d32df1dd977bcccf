"""The runner of stages, with stages that hang, crash, or are cut off half way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.gpu import run
from scripts.gpu.machine import ROOT, digest, unpack_wheels
from scripts.gpu.measuring import tell
from scripts.gpu.plan import STAGES, Stage, limit, rehearsed
from scripts.gpu.preflight import Found

HANGS = "import time; print('hangs', flush=True); time.sleep(1000)"
CRASHES = "import sys; print('about to crash', flush=True); sys.exit('no such device')"
ABORTS = "import os; os.abort()"
HALF = """
import json, os, subprocess, sys, time
from scripts.gpu.measuring import tell
tell("t", "first", {"ms": 1.5})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
tell("t", "child", {"pid": child.pid})
print('measured: {"table": "t", "na', end="", flush=True)
time.sleep(1000)
"""
LEAVES_A_SERVER = """
import subprocess, sys
from scripts.gpu.measuring import tell
command = ["sh", "-c", "sleep 1000 > /dev/null & echo $!"]
left = subprocess.run(command, start_new_session=True, stdout=subprocess.PIPE, text=True).stdout
tell("t", "left", {"pid": int(left)})
"""
WELL = "from scripts.gpu.measuring import tell; tell('t', 'last', {'tokens/s': 12345.6})"


def command_of(folder: Path, stages: list[Stage], minutes: float) -> str:
    """The command with other stages, as code."""
    return (
        "import sys\nfrom scripts.gpu import run\nfrom scripts.gpu.plan import Stage\n"
        f"stages = {stages!r}\n"
        f"options = ['--out', {str(folder)!r}, '--device', 'cpu', '--minutes', '{minutes}']\n"
        "sys.exit(run.main(options, stages, needs=()))"
    )


def run_stages(folder: Path, stages: list[Stage], minutes: float = 1.0) -> tuple[int, dict[str, Any], str]:
    """The exit status, the report and what was printed, of the command in a process of its own."""
    command = [sys.executable, "-c", command_of(folder, stages, minutes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.stderr == ""
    return ended.returncode, json.loads((folder / "report.json").read_text()), ended.stdout


def stage(letter: str, code: str, seconds: float) -> Stage:
    return Stage(letter, f"stage {letter}", seconds, ("-c", code))


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_stage_that_fails_never_stops_the_next(tmp_path: Path) -> None:
    """Of 10 minutes, those that hang get 2 and 8 s."""
    stages = [
        stage("a", HANGS, 2),
        stage("b", HALF, 8),
        stage("c", CRASHES, 200),
        stage("d", ABORTS, 200),
        stage("e", WELL, 185),
    ]
    status, report, printed = run_stages(tmp_path, stages, minutes=10)
    hung, half, crashed, aborted, well = report["stages"]
    assert status == 1
    assert hung["status"].startswith("killed at its limit of ")
    assert hung["seconds"] >= hung["limit_s"]
    assert 1.5 < hung["limit_s"] <= 2.0
    assert crashed["status"] == "exit status 1"
    assert crashed["output"] == ["about to crash", "no such device"]
    assert "   | no such device" in printed.splitlines()
    assert aborted["status"] == "ended by SIGABRT"
    assert half["status"].startswith("killed at its limit of ")
    first, child = half["measurements"]
    assert first == {"table": "t", "name": "first", "values": {"ms": 1.5}}
    assert not is_running(child["values"]["pid"])
    assert well["status"] == "done"
    assert well["measurements"][0]["values"] == {"tokens/s": 12345.6}
    page = (tmp_path / "report.md").read_text()
    assert "| last |  |  | 12,346 |" in page
    assert "| first | 1.5 |  |  |" in page
    assert "about to crash\n" in (tmp_path / "log.txt").read_text()


def test_what_a_stage_leaves_is_ended(tmp_path: Path) -> None:
    """Also what runs in a session of its own, and whose parent has ended."""
    status, report, _ = run_stages(tmp_path, [stage("a", LEAVES_A_SERVER, 1)])
    assert status == 0
    assert not is_running(report["stages"][0]["measurements"][0]["values"]["pid"])


WITH_A_SERVER = """
import os, subprocess, sys, time
from scripts.gpu.measuring import Stage, tell
stage = Stage()
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
try:
    tell("t", "own", {"stage": os.getpid(), "server": server.pid})
    time.sleep(1000)
finally:
    server.kill()
    server.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_run_that_is_ended_ends_its_stage_and_keeps_the_report(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Killed, it cannot do so itself: then its stage is told, and ends what it has started."""
    command = [sys.executable, "-c", command_of(tmp_path, [stage("a", WITH_A_SERVER, 1)], 10)]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=os.environ | {"TMPDIR": str(temporary)}) as process:
        assert process.stdout is not None
        assert any("own: stage" in line for line in process.stdout)
        process.send_signal(number)
        errors = process.communicate()[1]
    (told,) = json.loads((tmp_path / "report.json").read_text())["stages"][0]["measurements"]
    ended = json.loads((tmp_path / "report.json").read_text())["stages"][0]["status"]
    assert ended == ("running" if number == signal.SIGKILL else f"interrupted, exit status {128 + number}")
    assert errors == ""
    for pid in told["values"].values():
        while is_running(pid):  # the test's own limit ends this
            time.sleep(0.05)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert bool(list(temporary.iterdir())) == (number == signal.SIGKILL)


def test_all_stages_together_keep_the_limit(tmp_path: Path) -> None:
    """Each of three that hang gets a third of what is left, also of what one that ends has left."""
    stages = [stage("a", "pass", 4), *(stage(letter, HANGS, 1) for letter in "bcd")]
    began = time.monotonic()
    _, report, _ = run_stages(tmp_path, stages, minutes=(run.SPARE_S + 6) / 60)
    limits = [each["limit_s"] for each in report["stages"]]
    spent = [each["seconds"] for each in report["stages"]]
    assert sum(limits[1:]) <= 6.1
    assert limits[1] > 6 / 7, "more than its share at the begin"
    assert [each["status"][:6] for each in report["stages"]] == ["done", "killed", "killed", "killed"]
    assert sum(spent) <= time.monotonic() - began


def test_a_run_without_time_begins_no_stage(tmp_path: Path) -> None:
    _, report, _ = run_stages(tmp_path, [stage("a", HANGS, 1)], minutes=run.SPARE_S / 60)
    assert [each["status"] for each in report["stages"]] == ["not begun: no time is left"]


def test_a_stage_is_skipped_where_the_device_lacks_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, and it is no failure; the next one runs."""
    monkeypatch.setattr(run, "look", lambda *_: Found(facts={"device": "small"}, free=10 << 30))
    monkeypatch.setattr(run, "adopt_orphans", lambda: None)
    monkeypatch.setattr(run, "end_tree", lambda pid: None)  # those of other tests
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    large, small = stage("c", CRASHES, 1), stage("d", WELL, 1)
    stages = [replace(large, name="large", gib=20), replace(small, gib=10)]
    assert run.main(["--out", str(tmp_path)], stages) == 0
    status = "skipped: it needs 20 GiB of the device, 10.0 are free"
    assert [each["status"] for each in json.loads((tmp_path / "report.json").read_text())["stages"]] == [
        status,
        "done",
    ]
    lines = [line for line in capsys.readouterr().out.splitlines() if "large" in line]
    assert lines == [f"== c. large: {status}"]


def test_a_stage_whose_rows_are_errors_says_so(tmp_path: Path) -> None:
    failing = "from scripts.gpu.measuring import tell; tell('t', 'x', {'error': 'late'})"
    status, report, printed = run_stages(tmp_path, [stage("a", f"{failing}; {WELL}", 1)])
    assert status == 1
    assert report["stages"][0]["status"] == "done; 1 of 2 rows are errors"
    assert printed.splitlines()[-1].endswith("report.json: 1 failed")


def test_stages_are_chosen_by_letter_and_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [each.name for each in STAGES if each.is_called("llama")] == [
        "serve: llama-8b",
        "steps: llama-8b",
        "transformers: llama-8b",
    ]
    assert [each.letter for each in STAGES if each.is_called("d")] == ["d"]
    with pytest.raises(SystemExit):
        run.main(["--out", str(tmp_path), "--stages", "a,x"])
    assert "--stages x: no such stage; there are a, b, c, d, e, f" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--minutes=0", "--minutes 0: more than 0, at most 1440"),
        ("--minutes=nan", "--minutes nan: more than 0, at most 1440"),
        ("--stages=", "--stages : no such stage; there are a, b, c, d, e, f"),
        (f"--out={__file__}", f"--out {__file__}: [Errno 17] File exists"),
        (f"--out={__file__}/below", f"--out {__file__}/below: [Errno 20] Not a directory"),
        ("--minutes=inf", "--minutes inf: more than 0, at most 1440"),
    ],
)
def test_wrong_options_are_named(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run.main([f"--out={tmp_path}", option])
    assert message in capsys.readouterr().err


def test_the_stages_have_nine_minutes() -> None:
    assert sum(each.seconds for each in STAGES) <= 9 * 60 - run.SPARE_S
    assert [each.letter for each in STAGES] == sorted(each.letter for each in STAGES)
    assert limit(540.0, STAGES) == pytest.approx(540.0 * STAGES[0].seconds / sum(s.seconds for s in STAGES))
    assert limit(60.0, rehearsed(STAGES)) == pytest.approx(60.0 / len(STAGES))


def test_a_damaged_wheel_costs_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    with zipfile.ZipFile(tmp_path / "good-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("good.py", "x = 1\n" * 1000)
    flipped = bytearray((tmp_path / "good-1.0-py3-none-any.whl").read_bytes())
    flipped[40:50] = bytes(10)
    (tmp_path / "flipped-1.0-py3-none-any.whl").write_bytes(flipped)
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no archive")
    (tmp_path / "folder-1.0-py3-none-any.whl").mkdir()
    told = unpack_wheels(tmp_path, tmp_path / "site")
    assert (tmp_path / "site" / "good.py").read_text() == "x = 1\n" * 1000
    assert "broken (damaged: BadZipFile: File is not a zip file)" in told
    assert "folder (damaged: IsADirectoryError" in told
    assert "flipped (damaged: " in told
    assert told.endswith(", good")


def test_a_terminal_that_is_closed_or_knows_no_utf8_ends_nothing(tmp_path: Path) -> None:
    telling = "from scripts.gpu.measuring import tell; tell('t', 'a … b', {'ms': 1})"
    code = command_of(tmp_path, [stage("a", telling, 1)], 1.0)
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ascii_only)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "a ? b" in ended.stdout
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        subprocess.run([sys.executable, "-c", code], stdout=closed, stderr=subprocess.DEVNULL)
    (only,) = json.loads((tmp_path / "report.json").read_text())["stages"]
    assert only["status"] == "done"
    assert only["measurements"][0]["name"] == "a … b"


def test_what_is_missing_is_told_before_a_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        f"import sys; from scripts.gpu import run; sys.exit(run.main(sys.argv[1:], needs={('none_such',)!r}))"
    )
    command = [sys.executable, "-c", code, "--device=cpu", f"--out={tmp_path}", "--wheels=nothing"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 2
    assert "wheels: 0 in nothing, 0.0 MB: fetch_wheels fills a folder" in ended.stdout
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("no stage is begun: ")]
    assert json.loads((tmp_path / "report.json").read_text())["stages"] == []
    assert "cannot import none_such (missing)" in line


def test_a_copy_without_git_is_told_apart(tmp_path: Path) -> None:
    for folder in ("penstock", "scripts/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    source = tmp_path / "penstock" / "a.py"
    source.write_text("x = 1\n")
    before = digest(tmp_path)
    (tmp_path / "penstock" / "notes.txt").write_text("not a source")
    assert digest(tmp_path) == before
    source.write_text("x = 2\n")
    assert digest(tmp_path) != before
    assert len(before) == 12


def test_lines_of_a_stage_are_results(capsys: pytest.CaptureFixture[str]) -> None:
    tell("t", "n", {"ms": 1})
    assert capsys.readouterr().out == 'measured: {"table": "t", "name": "n", "values": {"ms": 1}}\n'
