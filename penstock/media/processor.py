"""The model's own processor, of transformers: what it makes of a picture, and what it writes into prompts.

Without torchvision, transformers' processors take Pillow and numpy: then PyTorch is not imported, which is
most of the memory and of the time to start.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.config.errors import ConfigError
from penstock.media.pages import PageFacts
from penstock.media.prepared import PreparedPicture
from penstock.wire.media.worker import MediaDescription

if TYPE_CHECKING:
    from PIL.Image import Image

_FILES = (
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
)
"""Files of a model that decide what its processor makes."""
_OF_THE_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
_LOW_SIDE = 512
"""OpenAI's size of a picture with detail low, in pixels."""
_TRIAL_SIZE = (96, 64)


class HfProcessor:
    """The processor of the model in ``model_dir``."""

    def __init__(self, model_dir: str, arguments: dict[str, Any]) -> None:
        """``arguments``: --mm-processor-kwargs. Raises ConfigError for a model whose processor takes no
        picture in the place of one token."""
        self._processor = _load(model_dir)
        self._arguments = arguments
        self._token = _image_token_id(model_dir, self._processor)
        tokenizer = self._processor.tokenizer
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._low = _low_detail(self._processor)
        self.description = self._describe(model_dir)
        self.digest = _digest(model_dir, self._processor, arguments)

    def takes_detail(self, detail: str) -> str:
        return "low" if detail == "low" and self._low else ""

    def prepare(self, image: Image, detail: str, source_bytes: int) -> PreparedPicture:
        ids, arrays, _, _ = self._call(self.description.placeholder, image, self._low if detail else {})
        grid = arrays.get("image_grid_thw")
        facts = PageFacts(
            ids=ids.astype("<i4").tobytes(),
            features=int(np.count_nonzero(ids == self._token)),
            grid=() if grid is None else tuple(grid[0].tolist()),
            source_bytes=source_bytes,
            pixels=image.width * image.height,
        )
        return PreparedPicture(facts, arrays)

    def _call(
        self, placeholder: str, image: Image, more: dict[str, Any]
    ) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]], str, str]:
        """The tokens of a picture, from its first mark to its last one, its arrays, and the texts that the
        processor puts before and after them."""
        output = self._processor(
            text=placeholder,
            images=[image],
            return_tensors="np",
            add_special_tokens=False,
            **self._arguments | more,
        )
        ids = np.asarray(output["input_ids"]).reshape(-1)
        arrays = {name: np.asarray(value) for name, value in output.items() if name not in _OF_THE_TEXT}
        marks = np.flatnonzero([token in self._added for token in ids.tolist()])
        if not marks.size or not np.any(ids == self._token):
            raise ValueError(f"no image token in the place of {placeholder!r}")
        first, last = int(marks[0]), int(marks[-1]) + 1
        decode = self._processor.tokenizer.decode
        return ids[first:last], arrays, decode(ids[:first].tolist()), decode(ids[last:].tolist())

    def _describe(self, model_dir: str) -> MediaDescription:
        """By a trial: the processor is asked what it does, not its documentation."""
        from PIL import Image

        name = type(self._processor).__name__
        trial = Image.new("RGB", _TRIAL_SIZE, (96, 128, 160))
        failures = []
        for placeholder in _placeholders(model_dir, self._processor):
            try:
                _, _, before, after = self._call(placeholder, trial, {})
            except Exception as error:  # noqa: BLE001 - whatever a processor raises, this is no placeholder
                failures.append(f"{placeholder!r}: {type(error).__name__}: {error}")
                continue
            return MediaDescription(placeholder, before, after, name)
        raise ConfigError(
            f"the processor {name} of {model_dir} takes no picture ({'; '.join(failures)[:1000]}); "
            "--language-model-only serves the model for text"
        )


def go_without_torch() -> None:
    """Keep transformers from importing PyTorch in this process, unless its processors need it."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would warn of what is left out
    if not _has_torchvision() and "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails


def _has_torchvision() -> bool:
    return importlib.util.find_spec("torchvision") is not None


def _load(model_dir: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        if _has_torchvision():
            processor = transformers.AutoProcessor.from_pretrained(model_dir)
        else:
            processor = _without_torchvision(transformers, model_dir)
    except Exception as error:
        raise ConfigError(
            f"the processor of {model_dir} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise ConfigError(f"the processor of {model_dir}, {type(processor).__name__}, takes no pictures")
    return processor


def _without_torchvision(transformers: Any, model_dir: str) -> Any:
    """As AutoProcessor, without the part for videos, which needs torchvision (and num2words)."""
    known = importlib.import_module("transformers.models.auto.processing_auto")
    name = next(_texts(model_dir, "processor_class"), "")
    name = name or known.PROCESSOR_MAPPING_NAMES.get(next(_texts(model_dir, "model_type"), ""), "")
    given: type[Any] | None = known.processor_class_from_name(name) if name else None
    if given is None:
        raise ValueError(f"transformers {transformers.__version__} has no processor {name!r}")
    module = sys.modules[given.__module__]
    if getattr(module, "num2words", module) is None:
        module.num2words = str  # type: ignore[attr-defined]

    class Processor(given):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    Processor.__name__ = given.__name__
    parts = {"image_processor": transformers.AutoImageProcessor, "tokenizer": transformers.AutoTokenizer}
    described, _ = given.get_processor_dict(model_dir)
    made = [
        parts[each].from_pretrained(model_dir) if each in parts else None for each in given.get_attributes()
    ]
    return Processor.from_args_and_dict(made, described)


def _texts(model_dir: str, key: str) -> Iterator[str]:
    """The values of ``key`` in the model's files."""
    for name in _FILES:
        path = Path(model_dir, name)
        if name.endswith("config.json") and path.is_file():
            value = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get(key)
            if isinstance(value, str):
                yield value


def _image_token_id(model_dir: str, processor: Any) -> int:
    """The token whose positions get the picture's features."""
    config = msgspec.json.decode(Path(model_dir, "config.json").read_bytes(), type=dict[str, Any])
    for found in (
        config.get("image_token_id"),
        config.get("image_token_index"),
        getattr(processor, "image_token_id", None),
    ):
        if isinstance(found, int):
            return found
    raise ConfigError(
        f"{model_dir}: neither config.json nor the processor says which token stands for images"
    )


def _placeholders(model_dir: str, processor: Any) -> list[str]:
    """What a chat template may write for a picture; those that the model's does write come first."""
    tokenizer = processor.tokenizer
    known = [
        getattr(part, name, None)
        for part in (processor, tokenizer)
        for name in ("boi_token", "image_token", "start_image_token")
    ]
    names = [name for name in dict.fromkeys(known) if isinstance(name, str) and name]
    template = str(
        getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None) or ""
    )
    return sorted(names, key=lambda name: name not in template)


def _low_detail(processor: Any) -> dict[str, Any]:
    """Arguments for detail low; none: pictures always have the same size."""
    image_processor = processor.image_processor
    if getattr(image_processor, "do_image_splitting", None):
        return {"do_image_splitting": False}
    if getattr(image_processor, "merge_size", None) and getattr(image_processor, "size", None):
        size = dict(image_processor.size)
        if {"shortest_edge", "longest_edge"} <= size.keys():
            size["longest_edge"] = min(size["longest_edge"], _LOW_SIDE**2)
            size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"])
            return {"size": size}
    return {}


def _digest(model_dir: str, processor: Any, arguments: dict[str, Any]) -> bytes:
    import PIL
    import transformers

    classes = [type(processor).__name__, type(processor.image_processor).__name__]
    facts = [*classes, transformers.__version__, PIL.__version__, msgspec.json.encode(arguments).decode()]
    digest = hashlib.blake2b(repr(facts).encode())
    for name in _FILES:
        path = Path(model_dir, name)
        data = path.read_bytes() if path.is_file() else b""
        digest.update(hashlib.blake2b(data).digest())
    return digest.digest()
