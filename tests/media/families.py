"""Directories with the processors of four families, each with a tiny tokenizer; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]


def _tokenizer(added: list[str], **more: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Line breaks merge, as those of real tokenizers do.
    vocabulary = {text: index for index, text in enumerate([*alphabet, "ĊĊ", "ĊĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>", *added])
    first = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", **more
    )


def _write(
    directory: Path, model_type: str, name: str, image_processor: Any, tokenizer: Any, **more: Any
) -> None:
    """As a checkpoint has them: preprocessor_config.json, tokenizer files, processor_config.json."""
    image_processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": name, **more}))
    token = tokenizer.convert_tokens_to_ids(
        {"gemma3": "<image_soft_token>", "qwen2_vl": "<|image_pad|>"}.get(model_type, "<image>")
    )
    config = {"model_type": model_type, "vision_config": {}, "image_token_id": token}
    (directory / "config.json").write_text(json.dumps(config))


def llava(directory: Path) -> None:
    from transformers import CLIPImageProcessorPil as Images

    images = Images(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    more = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    _write(directory, "llava", "LlavaProcessor", images, _tokenizer(["<image>"]), **more)


def llava_next(directory: Path) -> None:
    from transformers import LlavaNextImageProcessorPil as Images

    images = Images(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
    )
    more = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    _write(directory, "llava_next", "LlavaNextProcessor", images, _tokenizer(["<image>"]), **more)


def idefics3(directory: Path, family: str = "idefics3", name: str = "Idefics3Processor") -> None:
    from transformers import Idefics3ImageProcessorPil as Images

    images = Images(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    tokenizer = _tokenizer(
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES]
    )
    _write(directory, family, name, images, tokenizer, image_seq_len=4)


def smolvlm(directory: Path) -> None:
    idefics3(directory, "smolvlm", "SmolVLMProcessor")


def gemma3(directory: Path) -> None:
    from transformers import Gemma3ImageProcessorPil as Images

    marks = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer = _tokenizer([*marks.values()], extra_special_tokens=marks)
    images = Images(size={"height": 28, "width": 28})
    _write(directory, "gemma3", "Gemma3Processor", images, tokenizer, image_seq_length=4)


def qwen2_vl(directory: Path) -> None:
    from transformers import Qwen2VLImageProcessorPil as Images

    tokenizer = _tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    images = Images(min_pixels=28 * 28, max_pixels=84 * 84)
    _write(directory, "qwen2_vl", "Qwen2VLProcessor", images, tokenizer)


FAMILIES = {
    "llava": llava,
    "llava_next": llava_next,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "gemma3": gemma3,
    "qwen2_vl": qwen2_vl,
}
