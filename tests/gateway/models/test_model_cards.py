"""What servers of many kinds answer to GET /v1/models."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.gateway.models.model_cards import MAX_MODELS, read_listing


@pytest.mark.parametrize(
    ("listing", "names"),
    [
        (  # vLLM, with an adapter
            {
                "object": "list",
                "data": [
                    {"id": "m", "object": "model", "parent": None, "permission": [{}], "max_model_len": 4096},
                    {"id": "sql", "object": "model", "parent": "m"},
                ],
            },
            ["m", "sql"],
        ),
        (  # llama.cpp: the same in two shapes
            {"models": [{"name": "x.gguf"}], "data": [{"id": "x.gguf", "aliases": ["x"], "meta": {"n": 1}}]},
            ["x.gguf", "x"],
        ),
        ({"data": [{"type": "model", "id": "claude"}], "has_more": False}, ["claude"]),
        (
            {"object": "list", "data": [{"id": "mistral-large", "aliases": ["latest"]}]},
            ["mistral-large", "latest"],
        ),
        ([{"id": "a"}, {"id": "b"}], ["a", "b"]),
        ({"data": []}, []),
        ({"data": None}, []),
        (
            {
                "data": [
                    {"id": 7},
                    "m",
                    {"id": ""},
                    {"id": "a\nb"},
                    {"id": "x" * 300},
                    {"id": "m", "aliases": "z"},
                ]
            },
            ["m"],
        ),
        ({"error": "no"}, []),
        ("ok", []),
    ],
)
def test_names(listing: Any, names: list[str]) -> None:
    assert list(read_listing(msgspec.json.encode(listing))) == names


@pytest.mark.parametrize("body", [b"", b"<html>", b"{", b"\xff", b"[" * 100_000])
def test_no_listing(body: bytes) -> None:
    assert read_listing(body) == {}


def test_a_card_has_scalars_alone() -> None:
    entry = {
        "id": "m",
        "parent": None,
        "max_model_len": 4096,
        "permission": [{"id": "p"}],
        "license": "x" * 999,
    }
    body = msgspec.json.encode({"data": [entry]})
    assert read_listing(body)["m"] == {"id": "m", "parent": None, "max_model_len": 4096}


def test_models_of_one_endpoint_are_bounded() -> None:
    names = [str(number) for number in range(3000)]
    for entries in ([{"id": name} for name in names], [{"id": "m", "aliases": names}]):
        assert len(read_listing(msgspec.json.encode({"data": entries}))) == MAX_MODELS
