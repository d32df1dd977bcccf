"""Weights that a trainer's process broadcasts by gloo to a real fleet."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.control import WAIT_S, call, engine_process, of_all
from tests.integration.server import Server, client_of_each, wait_until
from tests.integration.weight_marks import update

pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from penstock.supervisor.startup.model_resolution import DEMO_DIR

SERVERS, ENGINES = 2, 2
TENSORS = load_file(DEMO_DIR / "model.safetensors")
TRAINER = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from safetensors.torch import load_file

source, port, members = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=members,
                        timeout=timedelta(seconds=240))
print("joined", flush=True)
tensors = load_file(source)
for line in sys.stdin:
    factor, count, dtype = line.split()
    for name in list(tensors)[: int(count)]:
        value = tensors[name] * float(factor)
        dist.broadcast(value.to(getattr(torch, dtype)) if dtype != "own" else value, 0)
    print("sent", flush=True)
"""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody is given meanwhile. Who asks for it by number gets it, as this socket does not
    listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class Trainer:
    """A process that broadcasts the demo model's weights, times a factor."""

    def __init__(self, client: httpx.Client, port: int) -> None:
        command = [sys.executable, "-c", TRAINER, str(DEMO_DIR / "model.safetensors"), str(port), "2"]
        environment = {"GLOO_SOCKET_IFNAME": "lo", "PATH": "/usr/bin:/bin"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            self.joined = call(
                client,
                f"/init_weight_transfer?timeout={WAIT_S:g}",
                {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "rank": 1},
            )
            assert self.joined["status"] == 200, self.joined
            self.wait_for("joined")
        except BaseException:
            self.kill()
            raise

    def send(self, factor: float, count: int = len(TENSORS), dtype: str = "own") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{factor} {count} {dtype}\n")
        self.process.stdin.flush()

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{word}\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def trainer_of(client: httpx.Client) -> Iterator[Trainer]:
    with reserved_port() as port:
        trainer = Trainer(client, port)
        try:
            yield trainer
        finally:
            trainer.kill()


MANIFEST: dict[str, Any] = {
    "names": list(TENSORS),
    "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in TENSORS.values()],
    "shapes": [list(tensor.shape) for tensor in TENSORS.values()],
}


def receive(client: httpx.Client, version: str, timeout: float = WAIT_S, **fields: Any) -> dict[str, Any]:
    body = {"broadcast": MANIFEST, "weight_version": version, **fields}
    return call(client, f"/update_weights?timeout={timeout:g}", body)


OPTIONS = ("--api-server-count", str(SERVERS), "--threads", "1", "--max-model-len", "512")
ADMIN = "--allow-loopback-admin"


@pytest.mark.parametrize("asked", [0, 1])
def test_a_call_that_waits_for_the_trainer_when_the_server_ends_says_so(tmp_path: Path, asked: int) -> None:
    """Also if another API server, which may end first, has started the receiver."""
    options = (*OPTIONS, ADMIN, "--weights-dir", str(tmp_path), "--drain-timeout", "3")
    with (
        Server(str(DEMO_DIR), *options, directory=tmp_path) as server,
        client_of_each(server, SERVERS, WAIT_S) as clients,
        trainer_of(clients[0]),
        ThreadPoolExecutor(1) as pool,
    ):
        reply = pool.submit(receive, clients[asked], "never")
        wait_until(lambda: bool(files_of(tmp_path)), WAIT_S, "the transfer")
        server.process.send_signal(signal.SIGTERM)
        body = reply.result(WAIT_S)
    assert (body["status"], body["error"]["code"]) == (503, "server_stopped"), body
    assert files_of(tmp_path) == []


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def fleet(weights_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = (*OPTIONS, "--data-parallel-size", str(ENGINES))
    admin = (ADMIN, "--weights-dir", str(weights_dir))
    directory = tmp_path_factory.mktemp("transfer")
    with Server(str(DEMO_DIR), *options, *admin, directory=directory) as running:
        yield running
    assert list(weights_dir.iterdir()) == []


@pytest.fixture
def clients(fleet: Server) -> Iterator[list[httpx.Client]]:
    with client_of_each(fleet, SERVERS, WAIT_S) as found:
        yield found


def files_of(weights_dir: Path) -> list[Path]:
    return list(weights_dir.glob("*/*.safetensors"))


def checksums(client: httpx.Client) -> set[str]:
    return {str(result) for result in of_all(client.get("/weights_checksum").json(), "result")}


def versions_of(client: httpx.Client) -> list[str | None]:
    return [each["weight_version"] for each in client.get("/weight_version").json()["engines"]]


def test_a_broadcast_is_what_a_file_with_the_same_weights_is(
    fleet: Server, clients: list[httpx.Client], weights_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "changed.safetensors"
    save_file({name: tensor * 0.5 for name, tensor in TENSORS.items()}, path)
    assert update(clients[0], str(path), "by path")["status"] == 200
    (by_path,) = checksums(clients[0])
    with trainer_of(clients[0]) as trainer:
        for number, (factor, client) in enumerate(((2.0, clients[1]), (0.5, clients[0]))):
            trainer.send(factor)  # before the call: it waits
            body = receive(client, f"step {number}")
            assert body["status"] == 200, body
            assert of_all(body, "error") == [None] * ENGINES
            trainer.wait_for("sent")
            assert (checksums(client) == {by_path}) is (factor == 0.5)
            assert len(files_of(weights_dir)) == 1
    fleet.kill(engine_process(fleet, 0))
    with httpx.Client(base_url=fleet.url, timeout=WAIT_S) as client:
        wait_until(lambda: len(fleet.children("engine")) == ENGINES, WAIT_S, "its successor")
        wait_until(lambda: versions_of(client) == ["step 1"] * ENGINES, WAIT_S, "its return")
        assert checksums(client) == {by_path}


def test_a_trainer_that_dies_in_the_middle_changes_nothing(
    clients: list[httpx.Client], weights_dir: Path
) -> None:
    before, files = (checksums(clients[0]), versions_of(clients[0])), files_of(weights_dir)
    with trainer_of(clients[1]) as trainer, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(receive, clients[0], "half")
        trainer.send(3.0, len(TENSORS) // 2)
        trainer.wait_for("sent")
        wait_until(lambda: len(files_of(weights_dir)) > len(files), WAIT_S, "the transfer")
        assert receive(clients[1], "meanwhile")["error"]["code"] == "busy"
        trainer.kill()
        body = reply.result(WAIT_S)
    assert (body["status"], body["error"]["code"]) == (502, "transfer_failed"), body
    assert (checksums(clients[0]), versions_of(clients[0])) == before
    assert files_of(weights_dir) == files
    assert receive(clients[0], "next")["error"]["code"] == "no_weight_transfer"


def test_a_trainer_that_sends_too_little_or_nothing_changes_nothing(
    clients: list[httpx.Client], weights_dir: Path
) -> None:
    before = checksums(clients[0])
    with trainer_of(clients[0]) as trainer:
        trainer.send(1.0, dtype="uint8")
        body = receive(clients[0], "short")
    assert (body["status"], body["error"]["code"]) == (502, "transfer_failed"), body
    assert "fewer than" in body["error"]["message"]
    with trainer_of(clients[0]):
        body = receive(clients[0], "nothing", timeout=1)
    assert (body["status"], body["error"]["code"]) == (504, "timeout"), body
    assert checksums(clients[0]) == before
    assert receive(clients[0], "next")["error"]["code"] == "no_weight_transfer"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"shapes": [[7], *MANIFEST["shapes"][1:]]}, "broadcast.shapes[0]"),
        ({"dtypes": MANIFEST["dtypes"][1:]}, "broadcast.dtypes"),
        ({"names": [*MANIFEST["names"][:-1], MANIFEST["names"][0]]}, f"broadcast.names[{len(TENSORS) - 1}]"),
        ({"dtypes": ["int3"] * len(TENSORS)}, "broadcast.dtypes[0]"),
        ({"names": "all"}, "broadcast.names"),
        (
            {"names": ["large"], "dtypes": ["float32"], "shapes": [[1 << 40]]},
            "broadcast",
        ),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_received(
    clients: list[httpx.Client], change: dict[str, Any], param: str
) -> None:
    """The receiver ends: what the trainer sends would be the next call's."""
    with trainer_of(clients[0]):
        body = receive(clients[1], "wrong", broadcast=MANIFEST | change)
        assert body["status"] == 400, body
        assert param in body["error"]["param"], body
        wait_until(
            lambda: receive(clients[0], "next")["error"]["code"] == "no_weight_transfer", WAIT_S, "its end"
        )


def test_a_group_that_is_not_complete_in_time(clients: list[httpx.Client]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        group = {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1]}
        body = call(clients[0], "/init_weight_transfer?timeout=1", group)
    assert (body["status"], body["error"]["code"]) == (504, "timeout"), body
    where = f"127.0.0.1:{group['master_port']} (master_address, master_port)"
    assert where in body["error"]["message"]
    body = call(clients[0], "/init_weight_transfer", group | {"rank": 2})
    assert (body["status"], body["error"]["param"]) == (400, "rank"), body


def test_a_group_of_another_size_than_the_trainers(clients: list[httpx.Client]) -> None:
    """Its members wait for each other: the call ends in time, and the receiver with it."""
    with reserved_port() as port:
        command = [sys.executable, "-c", TRAINER, str(DEMO_DIR / "model.safetensors"), str(port), "3"]
        trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            group = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
            body = call(clients[0], "/init_weight_transfer?timeout=20", group)
        finally:
            trainer.kill()
            trainer.communicate()
    assert body["status"] in (502, 504), body
    assert receive(clients[1], "next")["error"]["code"] == "no_weight_transfer"


def test_the_receiver_ends_with_the_api_server_that_started_it(fleet: Server) -> None:
    def receivers() -> list[psutil.Process]:
        servers = fleet.children("api-server")
        return [child for server in servers for child in server.children()]

    with client_of_each(fleet, SERVERS, WAIT_S) as clients, trainer_of(clients[0]):
        [receiver] = receivers()
        fleet.kill(*fleet.children("api-server"))
        receiver.wait(WAIT_S)
    wait_until(lambda: len(fleet.children("api-server")) == SERVERS, WAIT_S, "return")
    with client_of_each(fleet, SERVERS, WAIT_S) as clients:
        assert receive(clients[0], "next")["error"]["code"] == "no_weight_transfer"
        with trainer_of(clients[1]) as trainer:
            trainer.send(0.25)
            assert receive(clients[0], "again")["status"] == 200
