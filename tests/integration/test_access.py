"""Keys in front of every route, and nowhere to be seen."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.integration.server import SYNTHETIC, Server, wait_until


def test_keys_of_file_and_environment_guard_every_route_and_stay_secret(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# teams\nkey-of-the-file\n")
    path.chmod(0o600)
    environ = os.environ | {
        "PENSTOCK_API_KEY": "key-of-the-environment,another-key",
        "PENSTOCK_ADMIN_API_KEY": "key-of-the-administrator",
    }
    options = ("--api-key-file", str(path), "--log-level", "debug")
    with Server(*SYNTHETIC, *options, directory=tmp_path, environ=environ) as server:
        for key in ("key-of-the-file", "key-of-the-environment", "another-key"):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                assert client.completions.create(model="m", prompt="x", max_tokens=1).choices
        for probe in ("health", "ready", "ping"):
            assert server.get(f"/{probe}").status_code == 200
        for guarded in (
            "v1/models",
            "metrics",
            "status",
            "openapi.json",
            "load",
            "no/such/route",
            "//health",
        ):
            reply = server.get(f"/{guarded}", authorization="Bearer key-of-the")
            assert reply.status_code == 401, guarded
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for key, status in (("key-of-the", 401), ("another-key", 403), ("key-of-the-administrator", 200)):
            assert server.get("/debug/gc", authorization=f"Bearer {key}").status_code == status, key
        assert server.get("/metrics", authorization="Bearer key-of-the-administrator").status_code == 200
        shown = [part for process in processes(server) for part in process.cmdline()]
        assert "API key    required" in server.log
    for text in (*shown, server.log):
        assert "key-of" not in text
        assert "another-key" not in text


def test_a_key_is_revoked_by_sighup_also_on_open_connections(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    def write(keys: str) -> None:
        path.write_text(keys)
        path.chmod(0o600)

    def status(key: str) -> int:
        return held.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    write("leaked-key\nkept-key\n")
    options = ("--api-key-file", str(path), "--api-server-count", "2")
    with (
        Server(*SYNTHETIC, *options, directory=tmp_path) as server,
        httpx.Client(base_url=server.url, timeout=60) as held,
    ):
        assert (status("leaked-key"), status("further-key")) == (200, 401)
        engines = server.children("engine")
        write("kept-key\nfurther-key\n")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: status("leaked-key") == 401, 30, "the end of the key")
        assert "required, and each of the 2 administers the server" in server.log
        logged = "SIGHUP: --api-key-file: 2 keys are in effect, 1 added, 1 removed"
        wait_until(lambda: logged in server.log, 30, "the line of the log")
        wait_until(lambda: server.log.count("has served all it had") == 2, 90, "the end of both old ones")
        for _ in range(4):  # either of the new ones
            with httpx.Client(base_url=server.url, timeout=60) as held:
                found = [status(f"{which}-key") for which in ("leaked", "kept", "further")]
                assert found == [401, 200, 200]
        assert server.children("engine") == engines
        write("\n")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "it is empty" in server.log, 30, "the refusal of an empty file")
        with httpx.Client(base_url=server.url, timeout=60) as held:
            assert [status("kept-key"), status("leaked-key")] == [200, 401]
    assert "-key\n" not in server.log


def processes(server: Server) -> list[psutil.Process]:
    supervisor = psutil.Process(server.process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def test_a_key_on_the_command_line_is_warned_of(tmp_path: Path) -> None:
    with Server(*SYNTHETIC, "--api-key", "topsecret", "--no-web-page", directory=tmp_path) as server:
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="is not valid"),
        ):
            client.models.list()
        for path in ("/", "/docs", "/docs/", "/page/main.js"):
            assert server.get(path).status_code == 401
            assert server.get(path, authorization="Bearer topsecret").status_code == 404
        shown = [part for process in processes(server) for part in process.cmdline()]
    assert "--api-key: a command line can be read" in server.log
    assert "administers the server" not in server.log
    for text in (*shown, server.log):
        assert "topsecret" not in text


def test_the_flags_and_variables_of_a_vllm_pod_serve_with_its_key(tmp_path: Path) -> None:
    environ = os.environ | {
        "VLLM_API_KEY": "key-of-vllm",
        "VLLM_USE_MODELSCOPE": "false",
        "PENSTOCK_PORT": "tcp://10.0.0.1:8000",
        "PENSTOCK_PICKER_SERVICE_HOST": "10.0.0.2",
    }
    flags = ("--tensor-parallel-size", "1", "--enable-auto-tool-choice", "--disable-log-requests")
    with Server(*SYNTHETIC, *flags, directory=tmp_path, environ=environ) as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", authorization="Bearer key-of-vllm").status_code == 200
        shown = [part for process in processes(server) for part in process.cmdline()]
        assert "API key    required" in server.log
    assert not [text for text in (*shown, server.log) if "key-of-vllm" in text]
    remarks = [line for line in server.log.splitlines() if line.startswith("penstock: ")]
    assert [remark.split()[2].removesuffix(":") for remark in remarks] == [
        "PENSTOCK_PORT=tcp://10.0.0.1:8000",
        "variables",
        "--tensor-parallel-size",
        "--enable-auto-tool-choice",
        "--disable-log-requests",
    ]
