"""A model directory without a model, for engines that need only a tokenizer; engines, and who asks them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine.loops import Host
from tests.engine.peers import ApiServer
from tests.engine.support import byte_level_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with EOS 1, and a config.json that allows 512 tokens."""
    directory = tmp_path_factory.mktemp("model")
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"max_position_embeddings": 512, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def host(model_dir: Path, run_dir: str, stack: ExitStack) -> Callable[..., Host]:
    def start(**options: Any) -> Host:
        host = Host(model_dir, run_dir, **{"synthetic_step_ms": 1, "max_model_len": 100_000, **options})
        stack.callback(host.close)
        return host

    return start


@pytest.fixture
def connect(run_dir: str, stack: ExitStack) -> Callable[..., ApiServer]:
    """API servers that have said Hello and were welcomed."""

    def connect(server: int = 0, epoch: int = 0) -> ApiServer:
        peer = ApiServer(run_dir, server, epoch)
        stack.callback(peer.close)
        peer.hello()
        return peer

    return connect
