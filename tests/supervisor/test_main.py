"""The supervisor with real processes, sockets and signals; the children are fakes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
from pathlib import Path

import psutil
import pytest

from penstock.adapters.adapter_files import describe_adapter
from penstock.exit_codes import EXIT_FAILED, EXIT_OK
from penstock.supervisor.children.lifecycle import SIGNAL_DEBOUNCE_S
from tests.adapters import make_adapter
from tests.certificates import Certificates
from tests.supervisor.harness import PATIENCE_S, Running, Serve


def ask(running: Running) -> list[str]:
    """Role, index, epoch and process id of the API server that answers."""
    with socket.create_connection(("127.0.0.1", running.port()), timeout=PATIENCE_S) as connection:
        return connection.makefile().readline().split()


def gone(pids: set[int]) -> bool:
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    return not alive


# -- start ---------------------------------------------------------------------------------------------


def test_starts_serves_drains_and_leaves_nothing(serve: Serve) -> None:
    running = serve(api_server_count=2, data_parallel_size=2)
    running.until_ready()
    assert running.text.count("penstock 0.") == 1
    pids = {int(pid) for pid in re.findall(r"runs as process (\d+)", running.text)}
    assert len(pids) == 5
    assert {child.pid for child in running.children()} == pids
    run_dir = running.run_dir()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert ask(running)[0] == "api-server"

    running.process.send_signal(signal.SIGTERM)
    assert running.exit_code() == EXIT_OK
    assert gone(pids)
    assert not run_dir.exists()
    for name in ("api-server 0", "api-server 1"):
        assert re.search(rf"{name} +got Drain", running.text)
    for name in ("engine 0", "engine 1"):
        assert re.search(rf"{name} +got Stop", running.text)
        assert not re.search(rf"{name} +got Drain", running.text)
    # Engines go on until the last stream's API server is gone.
    assert running.text.index("got Stop") > running.text.rindex("got Drain")
    assert "Traceback" not in running.text
    assert len(re.findall(r"^ready in", running.text, re.M)) == 1


def test_processes_have_titles(serve: Serve) -> None:
    running = serve()
    running.until_ready()
    assert psutil.Process(running.process.pid).cmdline()[0] == "penstock: supervisor"
    titles = sorted(child.cmdline()[0] for child in running.children())
    assert titles == ["penstock: api-server 0", "penstock: engine 0"]


def test_children_hold_no_descriptors_of_each_other(serve: Serve) -> None:
    running = serve(data_parallel_size=2)
    running.until_ready()
    for rank in (0, 1):
        child = running.child(f"penstock: engine {rank}")
        sockets = [fd for fd in os.listdir(f"/proc/{child.pid}/fd") if _is_socket(child.pid, fd)]
        assert len(sockets) == 1, "its control channel alone"


def _is_socket(pid: int, fd: str) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    except FileNotFoundError:
        return False


def test_the_key_is_on_no_command_line_and_in_no_line(serve: Serve) -> None:
    running = serve(api_key=["s3cr3t"], log_level="debug")
    running.until_ready()
    for child in running.children():
        assert "s3cr3t" not in " ".join(child.cmdline())
    running.process.send_signal(signal.SIGTERM)
    assert running.exit_code() == EXIT_OK
    assert "s3cr3t" not in running.text
    assert "API key    required" in running.text


def test_progress_is_told(serve: Serve) -> None:
    running = serve({"engine": ["slow"]})
    running.until(r"supervisor +engine 0: loading weights \(50%\)")
    running.until_ready()


@pytest.mark.parametrize("role", ["engine", "api-server"])
def test_a_fatal_failure_at_start_is_told_once_and_ends_everything(serve: Serve, role: str) -> None:
    other = "api-server" if role == "engine" else "engine"
    running = serve({role: ["fatal"], other: ["hang"]})
    assert running.exit_code() == EXIT_FAILED
    assert re.findall(rf"ERROR +supervisor +{role} 0 ended with exit code 7: no such model", running.text)
    assert running.text.count("no such model") == 1
    assert "ready in" not in running.text
    assert gone({int(pid) for pid in re.findall(r"runs as process (\d+)", running.text)})
    assert not running.run_dir().exists()


def test_an_exception_at_start_shows_its_traceback_and_ends_everything(serve: Serve) -> None:
    running = serve({"engine": ["raise"]})
    assert running.exit_code() == EXIT_FAILED
    assert re.search(r"ERROR +engine 0 +Traceback", running.text)
    assert "engine 0 ended with exit code 3: ValueError: the weights are cursed" in running.text


def test_a_start_that_dies_every_time_is_given_up(serve: Serve) -> None:
    running = serve({"engine": ["die"]})
    assert running.exit_code() == EXIT_FAILED
    assert running.text.count("engine 0 was killed by SIGKILL") == 3
    assert "engine 0 keeps failing to start; giving up" in running.text


def test_a_start_that_hangs_ends_at_its_timeout(serve: Serve) -> None:
    running = serve({"engine": ["hang"]}, startup_timeout=3.0)
    assert running.exit_code() == EXIT_FAILED
    assert "not ready within 3 s (--startup-timeout)" in running.text


def test_a_port_in_use_names_its_holder(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        running = serve(port=port)
        assert running.exit_code() == EXIT_FAILED
    assert f"cannot listen on 127.0.0.1:{port}: it is in use by process {os.getpid()} (" in running.text
    assert "runs as process" not in running.text


def test_a_second_server_is_refused_by_name_and_the_first_serves_on(serve: Serve, short_dir: Path) -> None:
    first = serve(run_dir=str(short_dir / "run"))
    first.until_ready()
    by_port = serve(port=first.port())
    assert by_port.exit_code() == EXIT_FAILED
    # Its API server has the socket too.
    assert f"in use by process {first.process.pid} (penstock: supervisor);" in by_port.text
    by_run_dir = serve(run_dir=str(short_dir / "run"))
    assert by_run_dir.exit_code() == EXIT_FAILED
    assert f"in use by another penstock (process {first.process.pid})" in by_run_dir.text
    assert ask(first)[:2] == ["api-server", "0"]


def test_options_that_cannot_be_are_usage_errors(serve: Serve) -> None:
    running = serve(model="/no/such/model")
    assert running.exit_code() == 1  # the exit code of run_serve.py for a ConfigError
    assert "penstock: error: model /no/such/model: no such directory" in running.text


def test_a_file_limit_is_raised(serve: Serve) -> None:
    running = serve()
    running.until_ready()
    _, hard = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    for child in running.children():
        assert child.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)


# -- the end -------------------------------------------------------------------------------------------


def test_the_terminals_interrupt_reaches_everybody_and_still_drains(serve: Serve) -> None:
    running = serve()
    running.until_ready()
    os.killpg(running.process.pid, signal.SIGINT)
    assert running.exit_code() == EXIT_OK
    assert "got Drain" in running.text
    assert "KeyboardInterrupt" not in running.text
    assert "killed by" not in running.text


def test_streams_that_outlast_the_timeout_are_stopped(serve: Serve) -> None:
    running = serve({"api-server": ["deaf"]}, drain_timeout=0.2)
    running.until_ready()
    running.process.send_signal(signal.SIGTERM)
    assert running.exit_code() == EXIT_OK
    assert "streams still run after 0.2 s (--drain-timeout); they end with an error" in running.text
    assert re.search(r"api-server 0 +got Stop", running.text)


def test_a_second_signal_ends_at_once(serve: Serve) -> None:
    running = serve({"api-server": ["deaf"]}, drain_timeout=1000)
    running.until_ready()
    running.process.send_signal(signal.SIGINT)
    running.until("got Drain")
    while running.process.poll() is None:
        # What comes sooner is taken for the same signal: by a busy supervisor also what comes later.
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(3 * SIGNAL_DEBOUNCE_S)
        running.process.send_signal(signal.SIGINT)
    assert running.exit_code() == 128 + signal.SIGINT
    assert gone(running.pids)


def test_a_signal_while_models_load_does_not_wait_for_them(serve: Serve) -> None:
    running = serve({"engine": ["hang"]})
    running.until("engine 0: loading weights")
    running.process.send_signal(signal.SIGTERM)
    assert running.exit_code() == EXIT_OK
    assert "killing what has not ended" not in running.text
    assert gone(running.pids)


@pytest.mark.parametrize("engine", ["serve", "hang"])
def test_nothing_outlives_a_supervisor_that_is_killed(serve: Serve, engine: str) -> None:
    running = serve({"engine": [engine]}, api_server_count=2)
    if engine == "serve":
        running.until_ready()
    else:
        running.until("engine 0: loading weights")
    children = running.children()
    assert len(children) == 4
    running.process.kill()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == []


def test_sighup_replaces_api_servers_and_a_closed_terminal_ends_everything(serve: Serve) -> None:
    primary, secondary = os.openpty()
    running = serve(terminal=secondary)
    os.close(secondary)
    running.until_ready()
    running.process.send_signal(signal.SIGHUP)
    running.until("api-server 1 is ready and replaces api-server 0")
    running.until("api-server 0 has served all it had")
    assert ask(running)[:2] == ["api-server", "1"]
    os.close(primary)
    assert running.exit_code() == EXIT_OK
    assert "SIGHUP: shutting down" in running.text
    assert gone(running.pids)


def test_one_that_outlives_its_terminal_still_takes_sighup_as_an_order(serve: Serve) -> None:
    """As ``nohup`` starts it: with SIGHUP ignored."""
    primary, secondary = os.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = serve(terminal=secondary)
    finally:
        signal.signal(signal.SIGHUP, before)
    os.close(secondary)
    running.until_ready()
    running.process.send_signal(signal.SIGHUP)
    running.until("api-server 0 has served all it had")
    os.close(primary)
    assert ask(running)[:2] == ["api-server", "1"]
    running.process.send_signal(signal.SIGTERM)
    assert running.exit_code() == EXIT_OK
    assert "SIGHUP: shutting down" not in running.text


def test_sighup_while_starting_is_carried_out_after_the_start(serve: Serve) -> None:
    running = serve({"engine": ["until told"]})
    running.until("runs as process")
    running.process.send_signal(signal.SIGHUP)
    running.until("SIGHUP while starting: API servers are replaced after that")
    (running.run_dir() / "go").touch()
    running.until_ready()
    running.until("api-server 1 is ready and replaces api-server 0")


def test_sighup_is_an_order_where_there_is_no_terminal(serve: Serve) -> None:
    running = serve({"api-server": ["deaf"]})
    running.until_ready()
    running.process.send_signal(signal.SIGHUP)
    running.until("api-server 1 is ready and replaces api-server 0")
    running.process.send_signal(signal.SIGTERM)
    running.until("api-server 1 +got Drain")


# -- deaths --------------------------------------------------------------------------------------------


def test_an_api_server_that_is_killed_is_replaced_behind_the_same_socket(serve: Serve) -> None:
    running = serve()
    running.until_ready()
    _, _, epoch, pid = ask(running)
    assert epoch == "0"
    os.kill(int(pid), signal.SIGKILL)
    assert gone({int(pid)})  # what it took until then was its own
    # Connections wait in the socket meanwhile, none is refused.
    assert ask(running)[2] == "1"
    running.until("api-server 0 is ready again")
    running.process.send_signal(signal.SIGTERM)
    assert running.exit_code() == EXIT_OK
    assert running.text.count("api-server 0 was killed by SIGKILL") == 1


def test_an_engine_that_fails_is_told_with_its_reason_and_replaced(serve: Serve) -> None:
    running = serve()
    running.until_ready()
    running.child("penstock: engine 0").kill()
    running.until("ERROR +supervisor +engine 0 was killed by SIGKILL")
    running.until("engine 0 is ready again")
    assert Path(running.run_dir()).exists()


def test_a_replacement_that_never_starts_ends_the_server_after_a_drain(serve: Serve) -> None:
    running = serve({"engine": ["serve", "raise"]})
    running.until_ready()
    running.child("penstock: engine 0").kill()
    assert running.exit_code() == EXIT_FAILED
    assert running.text.count("engine 0 ended with exit code 1: ValueError: the weights are cursed") == 3
    assert re.search(r"api-server 0 +got Drain", running.text)


def test_signals_to_a_child_are_left_to_the_supervisor(serve: Serve) -> None:
    running = serve()
    running.until_ready()
    for child in running.children():
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(signum)
    assert ask(running)[2] == "0"
    running.process.send_signal(signal.SIGTERM)
    assert running.exit_code() == EXIT_OK
    assert "killed by" not in running.text


# -- files ---------------------------------------------------------------------------------------------


def test_a_chat_template_is_checked_before_anything_starts(serve: Serve, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if %}")
    running = serve(chat_template=str(template))
    assert running.exit_code() == 1  # the exit code of run_serve.py for a ConfigError
    assert running.text == (
        f"penstock: error: --chat-template {template}: chat template in {template}: line 1: "
        "Expected an expression, got 'end of statement block'\n"
    )


def test_adapters_are_checked_before_anything_starts(serve: Serve, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", rank=32)
    running = serve(enable_lora=True, lora_modules=[f"a={path}"])
    assert running.exit_code() == 1
    assert running.text == (
        f"penstock: error: --lora-modules a ({path}): layer model.layers.0.self_attn.q_proj: its rank is 32; "
        "--max-lora-rank is 16\n"
    )


def test_every_process_begins_with_the_adapters_of_the_start(serve: Serve, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    running = serve(enable_lora=True, lora_modules=[f"a={path}"])
    running.until_ready()
    begun = [json.loads(found) for found in re.findall(r"begins with (.*)", running.text)]
    assert len(begun) == 2, "an engine and an API server"
    [state] = begun[0].pop("states")
    assert begun[0] == {"type": "desired-states", "changes": {}}
    model = str(tmp_path / "model")
    digest = describe_adapter(str(path)).digest
    value = {"adapters": [["a", str(path), model, digest, 8]]}
    assert state == ["adapters", 1, value, False, True]
    assert begun[1].pop("states") == [state]


def test_a_private_key_that_others_can_read_is_warned_about(
    serve: Serve, certificates: Certificates, tmp_path: Path
) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(Path(certificates.key).read_bytes())
    key.chmod(0o644)
    running = serve({"engine": ["fatal"]}, ssl_certfile=certificates.chain, ssl_keyfile=str(key))
    assert running.exit_code() == EXIT_FAILED
    assert f"--ssl-keyfile {key} can be read by every user" in running.text
