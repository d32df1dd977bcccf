"""Files of a LoRA adapter that are replaced by hostile ones under the path and the name that it has."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import make_adapter
from tests.integration.clients import Streams
from tests.integration.golden import write_model
from tests.integration.server import Server, client_of_each
from tests.integration.test_adapters import layer_sizes, load

pytest.importorskip("torch")

SERVERS, ENGINES = 2, 2
WAIT_S = 90
BODY: dict[str, Any] = {"model": "policy", "prompt": "def main():", "temperature": 0, "ignore_eos": True}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    return layer_sizes(model_in(tmp_path_factory.mktemp("sizes")))


def model_in(directory: Path) -> Path:
    model = directory / "tiny-llama"
    model.mkdir()
    write_model(model)
    return model


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def fleet(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("fleet")
    options = ("--dtype", "float32", "--max-model-len", "4096", "--served-model-name", "tiny-llama")
    own = ("--threads", "1", "--enable-lora", "--lora-dir", str(adapters), "--allow-loopback-admin")
    size = ("--api-server-count", str(SERVERS), "--data-parallel-size", str(ENGINES))
    with Server(str(model_in(directory)), *options, *own, *size, directory=directory) as running:
        yield running


@pytest.fixture
def clients(fleet: Server) -> Iterator[list[httpx.Client]]:
    with client_of_each(fleet, SERVERS, WAIT_S) as found:
        yield found


def pipe(path: Path) -> None:
    (path / WEIGHTS).unlink()
    os.mkfifo(path / WEIGHTS)


def link_to(target: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / WEIGHTS).unlink()
        (path / WEIGHTS).symlink_to(target)

    return change


def linked_directory(path: Path) -> None:
    path.rename(path.parent.with_name("outside"))
    path.symlink_to(path.parent.with_name("outside"))


def cut(path: Path) -> None:
    size = (path / WEIGHTS).stat().st_size
    os.truncate(path / WEIGHTS, size - 4)


def huge(path: Path) -> None:
    os.truncate(path / WEIGHTS, 1 << 40)


def long_header(path: Path) -> None:
    (path / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 62) + b"{}")


def deep(path: Path) -> None:
    text = b'{"a":' * 100_000
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text)


def config(text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / CONFIG).write_text(text)

    return change


def spoilt(path: Path) -> None:
    data = bytearray((path / WEIGHTS).read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    (path / WEIGHTS).write_bytes(data)


def gone(path: Path) -> None:
    shutil.rmtree(path)


def emptied(path: Path) -> None:
    (path / WEIGHTS).write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (pipe, "not a regular file"),
        (link_to("/dev/zero"), "symbolic link"),
        (link_to("/etc/passwd"), "symbolic link"),
        (linked_directory, "lora_path"),
        (cut, "for them"),
        (huge, "the maximum is"),
        (emptied, "not a safetensors file"),
        (long_header, "does not fit"),
        (deep, "header"),
        (gone, "No such file"),
        (spoilt, "a value is NaN or infinite"),
        (config("[" * 100_000), CONFIG),
        (config('{"peft_type": "LORA", "r": 8, "lora_alpha": 1e999, "target_modules": ["q_proj"]}'), CONFIG),
        (config('{"peft_type": "LORA", "r": 100000, "lora_alpha": 8}'), CONFIG),
    ],
)
def test_they_change_nothing(
    fleet: Server,
    clients: list[httpx.Client],
    adapters: Path,
    sizes: dict[str, tuple[int, int]],
    change: Callable[[Path], None],
    message: str,
) -> None:
    path = adapters / "policy"
    with contextlib.ExitStack() as stack:
        stack.enter_context(restored(path, sizes))
        assert load(clients[0], "policy", "policy", replace=True).status_code == 200
        before = text_of(clients[0])
        streams = stack.enter_context(Streams(fleet.url, [BODY | {"max_tokens": 300}] * 4))
        streams.until_each_has(1)
        change(path)
        for client in clients:
            reply = load(client, "policy", "policy", replace=True)
            assert reply.status_code == (502 if change is spoilt else 400), reply.text
            assert message in reply.json()["error"]["message"], reply.text
            assert text_of(client) == before
        streams.until_all_ended()
        assert streams.failures == []


@contextlib.contextmanager
def restored(path: Path, sizes: dict[str, tuple[int, int]]) -> Iterator[None]:
    make_adapter(path, sizes, seed=1, scale=0.3)
    try:
        yield
    finally:
        if path.is_symlink():
            path.unlink()
            path.parent.with_name("outside").rename(path)
        shutil.rmtree(path, ignore_errors=True)


def text_of(client: httpx.Client) -> tuple[str, Any]:
    reply = client.post("/v1/completions", json=BODY | {"max_tokens": 20, "return_weight_versions": True})
    choice = reply.json()["choices"][0]
    return choice["text"], choice["weight_versions"]
