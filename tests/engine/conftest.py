"""A model directory without a model, for engines that need only a tokenizer."""

import json
from pathlib import Path

import pytest

from .support import byte_level_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with EOS 1, and a config.json that allows 512 tokens."""
    directory = tmp_path_factory.mktemp("model")
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    config = {"max_position_embeddings": 512, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory
