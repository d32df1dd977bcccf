"""Measurements that fail alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.gpu.report import RESULT

CODE = """
import logging, time
from scripts.gpu import measuring
from scripts.gpu.measuring import Stage, whole
stage = Stage("shape")
assert stage.options.shape == "small" and stage.device == "cpu" and not stage.tiny
with stage.measurement("t", "late", 0.2) as values:
    values["steps"] = 3
    time.sleep(600)
def swallow():
    while not measuring._alarm.late:
        try:
            time.sleep(0.01)
        except Exception:
            pass
with stage.measurement("t", "whole", 0.2) as values:
    try:
        whole(swallow)
    except Exception:
        values["swallowed"] = True
with stage.measurement("t", "broken", 100) as values:
    raise ValueError("no\\nsuch shape")
with stage.measurement("t", "good", 100) as values:
    values["ms"] = stage.told("before", "small")["row: x"]["ms"] + 1
with stage.measurement("t", "nothing", 100):
    pass
assert 500 < stage.left() <= 1000
stage.log_warnings()
for number in range(100):
    logging.getLogger("penstock").warning("no graphs")
    logging.getLogger("penstock").info("all is well")
try:
    raise ValueError("no kernel")
except ValueError:
    logging.getLogger("penstock").error("a batch has failed", exc_info=True)
"""


def test_measurements_fail_alone(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    row = {"table": "before", "name": "small: row: x", "values": {"ms": 1}}
    report.write_text(json.dumps({"stages": [{"measurements": [row]}]}))
    command = [sys.executable, "-c", CODE, "small", "--seconds=1000", "--device=cpu"]
    ended = subprocess.run(
        [*command, f"--report={report}"], capture_output=True, text=True, timeout=60, check=True
    )
    told = [json.loads(line.removeprefix(RESULT)) for line in ended.stdout.splitlines() if RESULT in line]
    late = "OutOfTime: the measurement took longer than it may"
    assert [(each["name"], each["values"]) for each in told] == [
        ("late", {"steps": 3, "error": late}),
        ("whole", {"error": late}),
        ("broken", {"error": "ValueError: no such shape"}),
        ("good", {"ms": 2}),
        ("no graphs", {"stage": "small"}),
        ("a batch has failed: ValueError: no kernel", {"stage": "small"}),
    ]
    assert "Traceback" in ended.stdout
