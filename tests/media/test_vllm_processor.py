"""vLLM's processor in a media worker, with a stand-in for vLLM.

tests/integration/test_vllm_images.py has vLLM itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.config.errors import ConfigError
from penstock.media.vllm_item import read_item
from penstock.media.vllm_processor import VllmProcessor

VOCABULARY = ["<mark>", "<end>", "<soft>", "\n\n", "a", "b"]
MARK, END, SOFT, BREAK = range(4)


class FakeTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        found = []
        while text:
            token = next(index for index, word in enumerate(VOCABULARY) if text.startswith(word))
            found.append(token)
            text = text.removeprefix(VOCABULARY[token])
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(VOCABULARY[token] for token in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return VOCABULARY[token]


class FakeProcessor:
    """Puts ``made`` in the place of a mark; vLLM's range is all of it."""

    def __init__(self) -> None:
        self.made = [BREAK, MARK, SOFT, SOFT, END, BREAK]
        self.info = SimpleNamespace(
            get_tokenizer=FakeTokenizer,
            supported_mm_limits={"image": None},
            parse_mm_data=lambda given: given,
        )

    def __call__(self, prompt: list[int], items: dict[str, list[Image.Image]]) -> dict[str, Any]:
        if MARK not in prompt:
            raise ValueError("no place for the image")
        (image,) = items["image"]
        embeds = np.array([token == SOFT for token in self.made])
        place = SimpleNamespace(
            offset=0,
            length=len(self.made),
            is_embed=None if embeds.all() else SimpleNamespace(numpy=lambda: embeds),
            get_num_embeds=lambda: int(embeds.sum()),
        )
        item = f"values of {image.width}".encode()
        return {
            "prompt_token_ids": self.made,
            "mm_placeholders": {"image": [place]},
            "mm_kwargs": {"image": [item]},
        }


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The parts of vLLM that are used. ``shown``: what the chat template writes for a picture."""
    fake = SimpleNamespace(
        shown="a<mark>b",
        processor=FakeProcessor(),
        model=SimpleNamespace(is_multimodal_model=True, architecture="Fake", dtype="f", multimodal_config=""),
        parsed=[],
    )

    def parse(arguments: list[str]) -> SimpleNamespace:
        if "--wrong" in arguments:
            raise SystemExit(2)
        fake.parsed.append(arguments)
        return SimpleNamespace()

    engine_args = SimpleNamespace(create_model_config=lambda: fake.model)
    model_class = SimpleNamespace(get_placeholder_str=lambda modality, number: fake.shown)
    registry = SimpleNamespace(
        create_processor=lambda model: fake.processor, _get_model_cls=lambda model: model_class
    )
    parts: dict[str, dict[str, Any]] = {
        "torch": {"set_num_threads": lambda number: None},
        "vllm": {},
        "vllm.engine.arg_utils": {
            "AsyncEngineArgs": SimpleNamespace(from_cli_args=lambda settings: engine_args)
        },
        "vllm.entrypoints.cli.serve": {"make_arg_parser": lambda parser: SimpleNamespace(parse_args=parse)},
        "vllm.multimodal": {"MULTIMODAL_REGISTRY": registry},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": object},
        "vllm.v1.serial_utils": {
            "MsgpackEncoder": lambda size_threshold: SimpleNamespace(encode=lambda item: [item])
        },
        "vllm.version": {"__version__": "0.32.0"},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def test_what_stands_around_a_picture_is_text(vllm: SimpleNamespace, tmp_path: Path) -> None:
    made = VllmProcessor([str(tmp_path), "--dtype", "float32"])
    assert vllm.parsed == [[str(tmp_path), "--dtype", "float32"]]
    description = made.description
    assert (description.placeholder, description.before, description.after) == ("<mark>", "\n\n", "\n\n")
    assert description.processor == "FakeProcessor of vLLM 0.32.0"
    facts, arrays = made.prepare(Image.new("RGB", (8, 4)), made.takes_detail("low"), 77)
    assert np.frombuffer(facts.ids, "<i4").tolist() == [MARK, SOFT, SOFT, END]
    assert (facts.features, facts.source_bytes, facts.pixels) == (2, 77, 32)
    item = read_item(arrays)
    assert (item.modality, item.offset, item.length) == ("image", 0, 4)
    assert bytes(item.data) == b"values of 8"
    assert arrays["embeds"].tolist() == [False, True, True, False]


def test_a_range_of_features_alone(vllm: SimpleNamespace, tmp_path: Path) -> None:
    vllm.processor.made = [SOFT] * 3
    vllm.shown = "<mark>"
    made = VllmProcessor([str(tmp_path)])
    assert (made.description.before, made.description.after) == ("", "")
    item = read_item(made.prepare(Image.new("RGB", (8, 4)), "", 1).arrays)
    assert (item.length, item.embeds) == (3, None)


def test_what_changes_pages_changes_the_digest(vllm: SimpleNamespace, tmp_path: Path) -> None:
    first = VllmProcessor([str(tmp_path)]).digest
    assert VllmProcessor([str(tmp_path)]).digest == first
    (tmp_path / "preprocessor_config.json").write_text("{}")
    second = VllmProcessor([str(tmp_path)]).digest
    vllm.model.dtype = "bfloat16"
    assert len({first, second, VllmProcessor([str(tmp_path)]).digest}) == 3


def test_models_without_such_pictures_are_refused_by_name(vllm: SimpleNamespace, tmp_path: Path) -> None:
    vllm.shown = "ab"
    with pytest.raises(ConfigError, match=r"^FakeProcessor of vLLM 0\.32\.0 does not put a picture in the"):
        VllmProcessor([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"^vLLM does not take the arguments of its engine"):
        VllmProcessor([str(tmp_path), "--wrong"])
    vllm.model.is_multimodal_model = False
    with pytest.raises(ConfigError, match=r"^vLLM 0\.32\.0 takes no pictures of Fake"):
        VllmProcessor([str(tmp_path)])
    del sys.modules["vllm.multimodal"]
    with pytest.raises(
        ConfigError, match=r"^vLLM cannot prepare pictures of .*No module named 'vllm\.multim"
    ):
        VllmProcessor([str(tmp_path)])
