"""Images through API servers and media workers to real engines of vLLM's, with a small random LLaVA.

The judge is transformers' own generation, to which vLLM's is equal for this model.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.integration.attached_vllm import AttachedVllm
from tests.integration.server import VLLM_START_S, Server, in_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}:"
)
TOKENS = 12
KINDS: Sequence[Sequence[int]] = ((), (0,), (1,), (0, 1, 0, 1))
"""Pictures of the requests."""


def picture(number: int) -> Image.Image:
    """It is cropped, not scaled: Pillow and torchvision differ in that."""
    values = np.random.default_rng(number).integers(0, 256, (32, 32 + 8 * number, 3), np.uint8)
    return Image.fromarray(values)


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Judge:
    """The model, and what transformers makes of a prompt."""

    def __init__(self, directory: Path) -> None:
        import torch
        import transformers
        from safetensors.torch import load_file, save_file

        from tests.engine.support import byte_level_tokenizer

        tokens = byte_level_tokenizer()
        tokens.add_special_tokens(["<image>"])
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokens, bos_token="<s>", eos_token="</s>"
        )
        vision = {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
        text = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 512}
        small = {"num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**vision, **small),
            text_config=transformers.LlamaConfig(
                **text, **small, num_key_value_heads=1, initializer_range=0.4
            ),
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            image_seq_length=16,
        )
        torch.manual_seed(0)
        self.model = transformers.LlavaForConditionalGeneration(config).to(torch.float32).eval()
        self.processor = transformers.LlavaProcessor(
            transformers.CLIPImageProcessorPil(
                size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
            ),
            tokenizer,
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=TEMPLATE,
        )
        self.model.save_pretrained(directory)
        self.processor.save_pretrained(directory)
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        path = directory / "model.safetensors"
        weights = {  # the names that checkpoints have, and vLLM reads
            name.replace("vision_tower.", "vision_tower.vision_model."): weight
            for name, weight in load_file(path).items()
        }
        save_file(weights, path, {"format": "pt"})

    def tokens(self, kind: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of the prompt, and of the reply."""
        text = "Hi" + "<image>what?" * len(kind) + ":"
        images = [picture(number) for number in kind] or None
        inputs = self.processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
        made = self.model.generate(**inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        prompt: list[int] = inputs["input_ids"][0].tolist()
        return prompt, made[0, len(prompt) :].tolist()


def ask(server: Server, kind: Sequence[int]) -> tuple[list[int], list[int]]:
    content: list[dict[str, Any]] = [{"type": "text", "text": "Hi"}]
    for number in kind:
        content.append({"type": "image_url", "image_url": {"url": data_url(picture(number))}})
        content.append({"type": "text", "text": "what?"})
    body = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    found = json.loads(reply.text)
    assert found["usage"]["prompt_tokens"] == len(found["prompt_token_ids"])
    return found["prompt_token_ids"], found["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Judge]:
    pytest.importorskip("vllm", reason="make test-vllm makes an environment with vLLM")
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"vLLM's models with images need a torchvision of its PyTorch: {error}")
    directory = tmp_path_factory.mktemp("tiny-llava")
    return directory, Judge(directory)


OPTIONS = ("--max-model-len", "512", "--media-workers", "1", "--media-cache", "16Mi")


@pytest.fixture(scope="module", params=[Server, AttachedVllm], ids=["started", "attached"])
def server(
    request: pytest.FixtureRequest, model: tuple[Path, Judge], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    fleet = (*OPTIONS, "--data-parallel-size", "2", "--api-server-count", "2")
    directory = tmp_path_factory.mktemp("vllm-images")
    with request.param(*in_vllm(model[0], *fleet), directory=directory, start_s=VLLM_START_S) as running:
        yield running


def test_tokens_are_transformers_own(server: Server, model: tuple[Path, Judge]) -> None:
    expected = {kind: model[1].tokens(kind) for kind in KINDS}
    with ThreadPoolExecutor(16) as threads:
        kinds = [*KINDS] * 8
        replies = list(threads.map(lambda kind: ask(server, kind), kinds))
    for kind, reply in zip(kinds, replies, strict=True):
        assert reply == expected[kind], kind
    decoded = server.metric("penstock:media_images_total", outcome="decoded")
    sent = server.metric("vllm:mm_cache_queries_total") - server.metric("vllm:mm_cache_hits_total")
    assert (decoded, sent) == (2, 4)


def test_streams_with_pictures_of_a_killed_engine_go_on(server: Server, model: tuple[Path, Judge]) -> None:
    expected = {kind: model[1].tokens(kind) for kind in KINDS}
    with ThreadPoolExecutor(16) as threads:
        kinds = [*KINDS] * 16
        replies = threads.map(lambda kind: ask(server, kind), kinds)
        next(replies)
        server.children("engine")[0].kill()
        assert [*replies] == [expected[kind] for kind in kinds[1:]]
