"""Prepares pictures for vLLM's engines, with vLLM's own processor of the model.

Runs in vLLM's environment, and imports of this package only what needs numpy and msgspec. The arrays of a
picture are vLLM's own message of it, which nobody else reads: see :mod:`penstock.media.vllm_item`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config.errors import ConfigError
from penstock.media.pages import PageFacts
from penstock.media.prepared import PreparedPicture
from penstock.media.vllm_item import item_arrays
from penstock.wire.media.worker import MediaDescription

if TYPE_CHECKING:
    from PIL.Image import Image

MODALITIES = ("image", "vision_chunk")
"""vLLM's names for a picture: of most models, and of those whose pictures and videos are the same to them."""
SAMPLE = 64
"""Pixels on a side of the picture by which it is learned how the model shows pictures."""
_ALWAYS_INLINE = 1 << 62
_DESCRIBING = ("*.json", "*.jinja", "*.model", "*.py")
"""Files of a model that decide what its processor makes."""
_LARGEST = 1 << 28
"""Bytes of such a file."""


class VllmProcessor:
    """One model's pictures. Used by one thread."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """``arguments``: what follows ``vllm serve`` in the engine's command, MODEL first. Raises ConfigError
        for a model of which vLLM prepares no pictures."""
        try:
            self._load(arguments)
        except ConfigError:
            raise
        except SystemExit:
            raise ConfigError("vLLM does not take the arguments of its engine for media workers") from None
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:600]
            raise ConfigError(
                f"vLLM cannot prepare pictures of {arguments[0]}: {reason}; --language-model-only serves the "
                "model for text"
            ) from error

    def _load(self, arguments: Sequence[str]) -> None:
        import torch
        from PIL import Image as pillow
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.cli.serve import make_arg_parser
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.serial_utils import MsgpackEncoder
        from vllm.version import __version__ as version

        torch.set_num_threads(1)  # of several workers each has a core
        parser = make_arg_parser(FlexibleArgumentParser())
        settings = parser.parse_args(list(arguments))
        settings.model = arguments[0]
        model = AsyncEngineArgs.from_cli_args(settings).create_model_config()
        if not model.is_multimodal_model:
            raise ConfigError(f"vLLM {version} takes no pictures of {model.architecture}")
        self._processor = MULTIMODAL_REGISTRY.create_processor(model)
        self._encoder = MsgpackEncoder(size_threshold=_ALWAYS_INLINE)
        name = f"{type(self._processor).__name__} of vLLM {version}"
        self.digest = _digest(f"{name} {model.dtype} {model.multimodal_config}", Path(arguments[0]))
        shown_by = MULTIMODAL_REGISTRY._get_model_cls(model).get_placeholder_str
        self.description = self._describe(name, shown_by, pillow.new("RGB", (SAMPLE, SAMPLE)))

    def _describe(self, name: str, shown_by: Any, sample: Image) -> MediaDescription:
        """Find the token that stands for a picture in the chat template, and what is put around its tokens,
        by a trial. ``shown_by``: vLLM's get_placeholder_str. Raises ConfigError."""
        tokenizer = self._processor.info.get_tokenizer()
        for modality in MODALITIES:
            if modality not in self._processor.info.supported_mm_limits:
                continue
            shown = shown_by(modality, 1) or ""
            self._modality = modality
            for token in dict.fromkeys(tokenizer.encode(shown, add_special_tokens=False)):
                self._placeholder = token
                try:
                    ids, _, _ = self._apply(sample)
                except (ValueError, RuntimeError, AssertionError):
                    continue  # vLLM finds no picture in a prompt of this token
                text = tokenizer.convert_ids_to_tokens(token)
                if tokenizer.encode(text, add_special_tokens=False) != [token]:
                    continue
                self._before, self._after = _blanks(ids, tokenizer), _blanks(ids[::-1], tokenizer)
                before = tokenizer.decode(ids[: self._before])
                after = tokenizer.decode(ids[len(ids) - self._after :])
                return MediaDescription(text, before, after, name)
        raise ConfigError(
            f"{name} does not put a picture in the place of one token, so that pictures of this model are "
            "not served; --language-model-only serves it for text"
        )

    def takes_detail(self, detail: str) -> str:
        """It changes nothing, as in ``vllm serve``."""
        return ""

    def prepare(self, image: Image, detail: str, source_bytes: int) -> PreparedPicture:
        """The pages of an RGB picture. Raises ValueError for one that the model does not take."""
        ids, place, item = self._apply(image)
        ids = ids[self._before : len(ids) - self._after]
        first, last = place.offset - self._before, place.offset - self._before + place.length
        mask = None
        if place.is_embed is not None:
            mask = place.is_embed.numpy()[max(0, -first) : place.length + min(0, len(ids) - last)]
        encoded = self._encoder.encode(item)
        assert len(encoded) == 1
        facts = PageFacts(
            np.array(ids, "<i4").tobytes(),
            place.get_num_embeds(),
            source_bytes=source_bytes,
            pixels=image.width * image.height,
        )
        first, last = max(0, first), min(last, len(ids))
        arrays = item_arrays(self._modality, first, last - first, mask, bytes(encoded[0]))
        return PreparedPicture(facts, arrays)

    def _apply(self, image: Image) -> tuple[list[int], Any, Any]:
        """The tokens of a picture, vLLM's PlaceholderRange in them, and its MultiModalKwargsItem."""
        given = {self._modality: [image]}
        made = self._processor([self._placeholder], self._processor.info.parse_mm_data(given))
        (place,) = made["mm_placeholders"][self._modality]
        (item,) = made["mm_kwargs"][self._modality]
        return list(made["prompt_token_ids"]), place, item


def _blanks(ids: Sequence[int], tokenizer: Any) -> int:
    """How many of the first tokens are line ends, which a tokenizer may join with what is beside it."""
    count = 0
    while count < len(ids) and set(tokenizer.decode([ids[count]])) == {"\n"}:
        count += 1
    return count


def _digest(described: str, directory: Path) -> bytes:
    digest = hashlib.blake2b(described.encode())
    for path in sorted(each for pattern in _DESCRIBING for each in directory.glob(pattern)):
        if path.stat().st_size <= _LARGEST:
            digest.update(path.name.encode() + hashlib.blake2b(path.read_bytes()).digest())
    return digest.digest()
