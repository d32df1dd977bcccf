from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import COMMANDS, CommandEntry, load, main
from penstock.config.introspect import options_of

ROOT = Path(penstock.__file__).parents[1]
HEAVY = {
    "aiohttp",
    "asyncio",
    "fastokens",
    "httptools",
    "httpx",
    "jinja2",
    "numpy",
    "rich",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvloop",
    "yaml",
    "zmq",
}
# `penstock serve --help` has 134 modules imported, 68 of them by the interpreter itself (Python 3.11).
MAX_MODULES = 180


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_no_arguments_show_the_commands_and_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: penstock COMMAND" in err


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_commands(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for entry in COMMANDS:
        assert (f"  {' '.join(entry.name)} " in out) == bool(entry.help)
    assert "docs-options" not in out


def test_help_of_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "  bench host  " in out
    assert "  serve " not in out
    assert main(["bench"]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"penstock {penstock.__version__}\npython 3.")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("srve", "unknown command srve; did you mean serve?\nSee penstock --help."),
        ("bench hots", "unknown command hots; did you mean host?\nSee penstock bench --help."),
        ("--versio", "unknown option --versio; did you mean --version?\nSee penstock --help."),
        ("serve --prot 1", "unknown option --prot; did you mean --port?\nSee penstock serve --help."),
        ("serve --port 70000", "--port: '70000' is not valid, it takes an integer from 0 to 65535"),
        (
            "gateway --endpoints http://u:pw@host",
            "--endpoints: 'http://***@host' is not valid, it takes one or more values, each "
            "http://HOST:PORT or https://HOST:PORT, without a path such as /v1",
        ),
        (
            "gateway --otlp-endpoint http://u:p/w@host",
            "--otlp-endpoint: 'http://***@host' is not valid, it takes http://HOST:PORT or "
            "https://HOST:PORT, without a user",
        ),
        (
            "gateway http://u:pw@host",
            "unexpected argument 'http://***@host'\nSee penstock gateway --help.",
        ),
        (
            "gateway --budget-store redis://u:1/w@host",
            "--budget-store: *** is not valid, it takes memory, redis://HOST[:PORT][/DB], rediss://… or "
            "unix://PATH",
        ),
        ("version --verbose", "unknown option --verbose\nSee penstock version --help."),
    ],
)
def test_mistakes_exit_with_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr() == ("", f"penstock: error: {message}\n")


def test_an_unknown_variable_is_a_warning_for_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQ", "1")
    monkeypatch.setenv("PENSTOCK_PICKER_PORT", "tcp://10.0.0.1:8080")
    assert main(["version"]) == 0
    assert capsys.readouterr().err == (
        "penstock: warning: unknown environment variable PENSTOCK_MAX_NUM_SEQ; "
        "did you mean PENSTOCK_MAX_NUM_SEQS?\n"
    )


def test_a_variable_of_any_command_is_fine_for_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in COMMANDS:
        for option in options_of(load(entry).config):
            monkeypatch.setenv(option.variable, "1")
    assert main(["version"]) == 0


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.module)
def test_a_listed_command_is_what_its_module_holds(entry: CommandEntry) -> None:
    command = load(entry)
    assert command.name == entry.name
    assert command.help


def test_an_interrupt_exits_as_a_shell_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.cli.main._run", interrupt)
    assert main([]) == 130


def test_descriptors_and_signals_that_a_parent_took_away_come_back() -> None:
    """A server would give children the descriptors of others as standard ones, and hear of no signal."""
    program = (
        "import os, signal, sys; sys.argv = ['penstock']; import penstock.cli.main as program;"
        "found = [os.fstat(number) for number in range(3)];"
        "os._exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())) or program.main(['version']))"
    )
    blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        ended = subprocess.run(
            ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program],
            timeout=60,
            check=False,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert ended.returncode == 0


def test_a_reader_that_leaves_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", "--help"],
            cwd=ROOT,
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.parametrize("line", [["--help"], ["--version"], ["serve", "--help"], ["chat", "--help"]])
def test_help_imports_nothing_heavy(line: list[str]) -> None:
    script = (
        "import json, sys; from penstock.cli.main import main; code = main(sys.argv[1:]);"
        "print(json.dumps([code, sorted(sys.modules)]))"
    )
    ended = python("-c", script, *line)
    code, modules = json.loads(ended.stdout.splitlines()[-1])
    assert code == 0
    assert not HEAVY & {module.partition(".")[0] for module in modules}
    assert len(modules) < MAX_MODULES


@pytest.mark.parametrize("entry", COMMANDS, ids=lambda entry: entry.module)
def test_importing_a_command_imports_nothing_heavy(entry: CommandEntry) -> None:
    ended = python("-c", f"import json, sys, {entry.module}; print(json.dumps(sorted(sys.modules)))")
    assert not HEAVY & {module.partition(".")[0] for module in json.loads(ended.stdout)}


def test_help_takes_little_cpu_time() -> None:
    script = (
        "import os; from penstock.cli.main import main; main(['serve', '--help']); print(sum(os.times()[:2]))"
    )
    started = time.monotonic()
    ended = python("-c", script)
    cpu = float(ended.stdout.splitlines()[-1])
    print(f"serve --help: {cpu:.3f} s of CPU time, {time.monotonic() - started:.3f} s of wall time")
    assert cpu < 0.3
