"""What one API key can learn about the prompts of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.server import Server

pytest.importorskip("torch")

MINE = {"Authorization": "Bearer mine"}
THEIRS = {"Authorization": "Bearer theirs"}
PROMPT = "The list of secret ingredients begins with salt, pepper, and a small spoon of sugar. " * 4
OPTIONS = ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "8", "--kv-cache-memory", "16Mi")


def cached(server: Server, headers: dict[str, str], **fields: Any) -> int:
    """Prompt tokens found in the prefix cache."""
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    usage = server.post("/v1/completions", body, **headers).raise_for_status().json()["usage"]
    details = usage["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


@pytest.mark.slow
def test_cached_tokens_tell_one_key_nothing_of_another(tmp_path: Path) -> None:
    with Server(*OPTIONS, "--api-key", "mine", "theirs", directory=tmp_path) as server:
        assert cached(server, THEIRS) == 0
        own = cached(server, THEIRS)
        assert own > 16
        assert cached(server, MINE) == 0
        assert cached(server, {"X-Api-Key": "theirs"}) == own, "the same tenant by another header"
        assert cached(server, THEIRS, cache_salt="s") == 0
        assert cached(server, MINE, cache_salt="s") == 0
        assert cached(server, THEIRS, cache_salt="s") == own


@pytest.mark.slow
@pytest.mark.parametrize("keys", [("theirs",), ("mine", "theirs", "--shared-prefix-cache")])
def test_prefixes_are_shared_with_one_key_or_on_demand(tmp_path: Path, keys: tuple[str, ...]) -> None:
    with Server(*OPTIONS, "--api-key", *keys, directory=tmp_path) as server:
        assert cached(server, THEIRS) == 0
        assert cached(server, THEIRS if len(keys) == 1 else MINE) > 16
