"""Requests against a KV cache that is smaller than the model's context."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.server import Server

pytest.importorskip("torch")


@pytest.mark.slow
def test_a_chat_without_max_tokens_ends_where_the_cache_is_full(tmp_path: Path) -> None:
    options = ("--dtype", "float32", "--threads", "1", "--max-num-seqs", "8", "--kv-cache-memory", "1Mi")
    with Server(*options, directory=tmp_path) as server:
        messages = [{"role": "user", "content": "Who are you?"}]
        body = {"messages": messages, "ignore_eos": True}
        reply = server.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        used = reply.json()["usage"]["total_tokens"]
        context = server.get("/v1/models").json()["data"][0]["max_model_len"]
        assert used < context
        refused = server.post("/v1/chat/completions", body | {"max_tokens": context - 200})
        assert refused.status_code == 400
        assert f"holds {used - 1}" in refused.json()["error"]["message"]
