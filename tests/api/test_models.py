"""The list of models."""

from __future__ import annotations

from penstock.api.routes.models import model_list
from penstock.generation.model_info import ModelInfo
from penstock.wire.messages import Adapter


def test_adapters_are_listed_behind_the_model_with_their_parent() -> None:
    adapters = (Adapter("tuned", "/tuned"), Adapter("other", "/other", "base"))
    model_info = ModelInfo(names=("m", "alias"), max_model_len=64, vocab_size=8)
    listed = model_list(model_info, "/model", adapters, {"claude": "tuned", "gone": "unloaded"}, 7)
    assert listed["object"] == "list"
    assert [(card["id"], card["root"], card["parent"]) for card in listed["data"]] == [
        ("m", "/model", None),
        ("alias", "/model", None),
        ("tuned", "/tuned", "m"),
        ("other", "/other", "base"),
        ("claude", "/tuned", "tuned"),
    ]
    assert {card["created"] for card in listed["data"]} == {7}
    assert {card["max_model_len"] for card in listed["data"]} == {64}
