"""A tiny random LLaVA through the torch engine: pictures of requests, as transformers sees them."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.server import Server
from tests.media.families import llava

pytestmark = pytest.mark.slow
Image = pytest.importorskip("PIL.Image")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = 12
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %} assistant:"
)


def make_llava(directory: Path) -> Any:
    """A random model, with its processor."""
    from tests.engine.torch.harness import make_model

    llava(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    vision = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 32}
    vision |= {"hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in (("bos", "<s>"), ("eos", "</s>"))}
    model = make_model(
        "llava",
        directory,
        vision_config=vision | {"initializer_range": 0.4},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
    )
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return model.to("cpu")


def expected(model: Any, directory: Path, text: str, images: Sequence[Any]) -> list[int]:
    processor = transformers.AutoProcessor.from_pretrained(directory)
    inputs = processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, pad_token_id=2)
    found: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return found


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_llava(tmp_path)
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 255, (40, 60, 3), np.uint8)) for _ in range(4)]
    urls = []
    for image in images:
        data = io.BytesIO()
        image.save(data, "PNG")
        urls.append("data:image/png;base64," + b64encode(data.getvalue()).decode())
    options = ("--threads", "1", "--kv-cache-memory", "32Mi", "--data-parallel-size", "2")
    with Server(str(tmp_path), *options, "--media-workers", "1", directory=tmp_path) as server:
        for shown in ([], [0], [1, 2, 3, 0], [0]):
            content: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
            for number in shown:
                content.append({"type": "image_url", "image_url": {"url": urls[number]}})
            body = {
                "messages": [{"role": "user", "content": content}],
                "max_tokens": TOKENS,
                "temperature": 0,
                "return_token_ids": True,
            }
            choice = server.post("/v1/chat/completions", body).json()["choices"][0]
            text = f"user: Look: {'<image>' * len(shown)} assistant:"
            assert choice["token_ids"] == expected(model, tmp_path, text, [images[each] for each in shown])
