"""Several workers, one that dies, and their replacement."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.gateway.supervisor import _worker_environment
from tests.gateway.behaviours import DONE, TEXT, good, stalled_in_stream
from tests.gateway.processes import WAIT_S, Call, Gateway, Upstream, closed_port, eventually, gateway

BODY = {"model": "m", "prompt": "p", "stream": True}


def has_logged(front: Gateway, text: str) -> bool:
    return any(text in line for line in front.lines)


def status(front: Gateway, key: str = "") -> int:
    """Of a request on a connection of its own."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(front.url + "/v1/completions", json=BODY, headers=headers, timeout=WAIT_S).status_code


def test_sighup_replaces_the_worker_and_reads_the_options_again(tmp_path: Path) -> None:
    keys, options = tmp_path / "keys", tmp_path / "gateway.yaml"
    keys.write_text("old\n")
    keys.chmod(0o600)
    with Upstream(stalled_in_stream) as server:
        options.write_text(f"endpoints: [{closed_port()}]\napi_key_file: {keys}\n")
        with gateway(options=("--config", str(options))) as front:
            [old] = front.workers
            assert status(front, "old") == 502
            keys.write_text("new\n")
            options.write_text(f"endpoints: [{server.url}]\napi_key_file: {keys}\ndrain_timeout: 7\n")
            front.process.send_signal(signal.SIGHUP)
            eventually(lambda: has_logged(front, "gateway 0 has served all it had"))
            assert has_logged(front, "SIGHUP: --drain-timeout stays 60.0 until the gateway is started again")
            assert not old.is_running()
            assert status(front, "old") == 401
            server.behaviour = good
            assert status(front, "new") == 200


def test_no_request_fails_while_the_worker_is_replaced() -> None:
    with (
        Upstream(good) as server,
        gateway(server, options=("--access-log", "none")) as front,
        ThreadPoolExecutor() as pool,
    ):
        enough = threading.Event()

        def ask_on_one_connection() -> list[int]:
            statuses = []
            with httpx.Client(base_url=front.url, timeout=WAIT_S) as client:
                while not enough.is_set():
                    statuses.append(client.post("/v1/completions", json=BODY).status_code)
            return statuses

        def ask_on_new_connections() -> list[int]:
            statuses = []
            while not enough.is_set():
                statuses.append(status(front))
            return statuses

        asking = [pool.submit(ask_on_one_connection), pool.submit(ask_on_new_connections)]
        front.process.send_signal(signal.SIGHUP)
        try:
            eventually(lambda: has_logged(front, "gateway 0 has served all it had"))
        finally:
            enough.set()
        statuses = [status for each in asking for status in each.result()]
        assert set(statuses) == {200}
        assert front.counts() == {"ok": len(statuses)}


def unusable(directory: Path) -> str:
    """Options that no worker can run, which the worker alone finds out."""
    pytest.importorskip("kubernetes")
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text("contexts: []\n")
    return f"kubernetes_pool: [llama]\nkubernetes_config: {kubeconfig}\n"


def test_options_that_are_wrong_change_nothing(tmp_path: Path) -> None:
    """Wrong options are noticed by the supervisor, what no worker can run by the first replacement."""
    options = tmp_path / "gateway.yaml"
    with Upstream(good) as server:
        options.write_text(f"endpoints: [{server.url}]\n")
        with gateway(options=("--config", str(options))) as front:
            before = front.workers
            for text, problem in (
                ("max_attempts: 99\n", "'99' is not valid for --max-attempts"),
                ("scorers: queu=1\n", "there is no scorer 'queu'"),
                (
                    "endpoints_file: /absent\n",
                    "/absent: No such file or directory; the gateway goes on with the",
                ),
                (unusable(tmp_path), "gateway 0 goes on; the rolling restart ends"),
            ):
                options.write_text(f"endpoints: [{server.url}]\n{text}")
                front.process.send_signal(signal.SIGHUP)
                eventually(lambda problem=problem: has_logged(front, problem))  # type: ignore[misc]
            assert front.workers == before
            assert front.complete().status_code == 200
            before[0].kill()
            eventually(lambda: has_logged(front, "gateway 0 is ready again"))
            assert front.complete().status_code == 200


def test_a_revoked_key_is_refused_by_workers_that_go_on(tmp_path: Path) -> None:
    """Also on open connections, and by what is started in the place of such a worker."""
    keys, options = tmp_path / "keys", tmp_path / "gateway.yaml"
    keys.write_text("leaked\nkept\n")
    keys.chmod(0o600)
    with Upstream(good) as server:
        given = f"endpoints: [{server.url}]\napi_key_file: {keys}\n"
        options.write_text(given)
        with gateway(options=("--config", str(options))) as front:

            def on_open_connection(key: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                return front.client.post("/v1/completions", json=BODY, headers=headers).status_code

            assert on_open_connection("leaked") == 200
            keys.write_text("kept\n")
            options.write_text(f"{given}{unusable(tmp_path)}")
            front.process.send_signal(signal.SIGHUP)
            eventually(lambda: has_logged(front, "gateway 0 goes on; the rolling restart ends"))
            assert [on_open_connection(key) for key in ("leaked", "kept")] == [401, 200]
            front.workers[0].kill()
            eventually(lambda: has_logged(front, "gateway 0 is ready again"))
            assert [status(front, key) for key in ("leaked", "kept")] == [401, 200]


def test_sighup_while_workers_are_replaced_replaces_them_again(tmp_path: Path) -> None:
    options = tmp_path / "gateway.yaml"
    options.write_text(f"endpoints: [{closed_port()}]\nworkers: 2\n")
    again = "SIGHUP while replacing workers: they are replaced again after"
    read = "SIGHUP: --workers stays 2 until the gateway is started again"
    with gateway(options=("--config", str(options))) as front:
        for template in front.templates:
            template.suspend()  # the first replacement takes until it goes on
        front.process.send_signal(signal.SIGHUP)
        eventually(lambda: has_logged(front, "SIGHUP: replacing 2 workers one by one"))
        options.write_text(f"endpoints: [{closed_port()}]\nworkers: 3\n")
        front.process.send_signal(signal.SIGHUP)
        for template in front.templates:
            template.resume()
        eventually(lambda: has_logged(front, read))
        assert [text for line in front.lines for text in (again, read) if text in line][:2] == [again, read]
        eventually(lambda: has_logged(front, "is ready and replaces gateway 3"))


def test_one_worker_dies_and_the_other_goes_on() -> None:
    with (
        Upstream(stalled_in_stream) as server,
        gateway(server, options=("--workers", "2")) as front,
        httpx.Client(base_url=front.url, timeout=WAIT_S) as first,
        httpx.Client(base_url=front.url, timeout=WAIT_S) as second,
        first.stream("POST", "/v1/completions", json=BODY) as one,
        second.stream("POST", "/v1/completions", json=BODY) as other,
    ):
        lines = one.iter_lines(), other.iter_lines()
        assert [next(each) for each in lines] == [f"data: {TEXT}"] * 2
        victim, survivor = front.workers
        victim.kill()
        eventually(lambda: has_logged(front, "gateway 0 is ready again"))
        for call in server.calls:
            if not call.gone.is_set():
                call.chunk(f"data: {DONE}\n\n".encode())
                call.send(b"0\r\n\r\n")
        ends = []
        for each in lines:
            try:
                ends.append(list(each)[-2:] == [f"data: {DONE}", ""])
            except httpx.RemoteProtocolError:
                ends.append(False)
        assert sorted(ends) == [False, True]
        assert survivor in front.workers


def test_one_worker_scrapes_for_all_and_another_takes_over() -> None:
    scrapers: list[int] = []
    with Upstream(good) as server:

        def on_metrics(call: Call) -> None:
            scrapers.append(call.connection.getpeername()[1])
            call.reply(200, server.metrics, "text/plain")

        server.on_metrics = on_metrics
        with gateway(server, options=("--workers", "2", "--scrape-interval", "0.05")) as front:
            scrapers.clear()
            eventually(lambda: len(scrapers) >= 10)
            [scraper] = set(scrapers[3:])
            front.workers[0].kill()
            eventually(lambda: scrapers[-1] != scraper)


def test_wrong_options_have_their_exit_code(tmp_path: Path) -> None:
    """Those that a worker finds, too."""
    options = tmp_path / "gateway.yaml"
    options.write_text(unusable(tmp_path))
    command = [sys.executable, "-m", "penstock.cli.main", "gateway", "--port", "0", "--config", str(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 2
    assert "--kubernetes-config" in done.stderr


def test_workers_hash_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a seed that no client foresees, or by the one of the environment."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    environs = [_worker_environment(), _worker_environment()]
    assert all(environ and int(environ["PYTHONHASHSEED"]) > 0 for environ in environs)
    assert environs[0] != environs[1]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert _worker_environment() is None
