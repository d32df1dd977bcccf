"""Pictures as processors would prepare them, and what transformers says to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from penstock.media.pages import PageFacts
from penstock.media.store import MediaStore
from penstock.wire.media.items import MediaItem
from penstock.wire.messages import Submit
from tests.engine.torch.harness import DEVICE, IMAGE, VOCAB, submit

Arrays = dict[str, NDArray[Any]]
MARKS = VOCAB - 2, VOCAB - 3
"""Tokens before and behind those of a picture."""


def pixels(random: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return random.normal(size=shape).astype(np.float32)


def _llava(random: np.random.Generator) -> tuple[Arrays, list[int]]:
    return {"pixel_values": pixels(random, 1, 3, 16, 16)}, [IMAGE] * 16


def _idefics(random: np.random.Generator) -> tuple[Arrays, list[int]]:
    """One to four tiles of 16 x 16, the last of which is not filled."""
    tiles = int(random.integers(1, 5))
    mask = np.ones((1, tiles, 16, 16), np.int64)
    mask[:, -1, 8:] = 0
    arrays = {"pixel_values": pixels(random, 1, tiles, 3, 16, 16), "pixel_attention_mask": mask}
    return arrays, [*([MARKS[0], *[IMAGE] * 4] * tiles), MARKS[1]]


def _llava_next(random: np.random.Generator) -> tuple[Arrays, list[int]]:
    """A picture of 30 x 20 in four tiles of 16 x 16, and the whole: features of padding are left out, and
    each row has one more."""
    arrays = {"pixel_values": pixels(random, 1, 5, 3, 16, 16), "image_sizes": np.array([[20, 30]])}
    return arrays, [IMAGE] * (16 + 6 * 9)


def _gemma(random: np.random.Generator) -> tuple[Arrays, list[int]]:
    return {"pixel_values": pixels(random, 1, 3, 24, 24)}, [MARKS[0], *[IMAGE] * 9, MARKS[1]]


def _qwen(random: np.random.Generator) -> tuple[Arrays, list[int]]:
    """Two to eight patches of 4 x 4 high and wide, of which two by two make a feature."""
    height, width = (int(side) for side in 2 * random.integers(1, 5, size=2))
    arrays = {
        "pixel_values": pixels(random, height * width, 3 * 2 * 4 * 4),
        "image_grid_thw": np.array([[1, height, width]]),
    }
    return arrays, [MARKS[0], *[IMAGE] * (height * width // 4), MARKS[1]]


FAMILIES: dict[str, Callable[[np.random.Generator], tuple[Arrays, list[int]]]] = {
    "gemma3": _gemma,
    "idefics3": _idefics,
    "llava": _llava,
    "llava_next": _llava_next,
    "qwen2_5_vl": _qwen,
    "qwen2_vl": _qwen,
    "smolvlm": _idefics,
}
"""What a family's processor would make of a picture, here of a random one: the encoder's arrays, and the
tokens in the place of its placeholder."""


class Picture(NamedTuple):
    key: bytes
    arrays: Arrays
    ids: list[int]
    """Tokens in the place of its placeholder."""

    @property
    def grid(self) -> tuple[int, ...]:
        found = self.arrays.get("image_grid_thw")
        return () if found is None else tuple(found[0].tolist())


Prompt = Sequence[int | Picture]


def picture(kind: str, number: int) -> Picture:
    """A random picture for models of a family."""
    arrays, ids = FAMILIES[kind](np.random.default_rng(number))
    return Picture(number.to_bytes(16, "little"), arrays, ids)


def seal(store: MediaStore, given: Picture) -> int:
    """Put a picture into a store. Returns the bytes of its file."""
    facts = PageFacts(np.array(given.ids, "<i4").tobytes(), given.ids.count(IMAGE), given.grid)
    with store.write(given.key, facts, given.arrays) as lease:
        return lease.size


def asking(store: MediaStore, stream: int, prompt: Prompt, **options: Any) -> Submit:
    """A request, whose pictures are put into the store."""
    media: list[MediaItem] = []
    at = 0
    for part in prompt:
        if isinstance(part, Picture):
            media.append(MediaItem(part.key, at, len(part.ids), seal(store, part), part.grid))
        at += len(part.ids) if isinstance(part, Picture) else 1
    return msgspec.structs.replace(submit(stream, flat(prompt), **options), media=tuple(media))


@torch.inference_mode()
def generated(model: transformers.PreTrainedModel, prompt: Prompt, tokens: int) -> list[int]:
    """The continuation of a prompt by transformers itself."""
    ids = torch.tensor([flat(prompt)], device=DEVICE)
    pictures = [part for part in prompt if isinstance(part, Picture)]
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=2,
        **together(pictures),
        **_kinds(model, ids),
    )
    continued: list[int] = output[0, ids.shape[1] :].tolist()
    return continued


def _kinds(model: transformers.PreTrainedModel, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the processors of some families say of each token: whether it stands for a feature."""
    kind = model.config.model_type
    name = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids" if kind.startswith("qwen") else None
    return {} if name is None else {name: (ids == IMAGE).int()}


def flat(prompt: Prompt) -> list[int]:
    """Token ids of texts and pictures."""
    return [token for part in prompt for token in (part.ids if isinstance(part, Picture) else [part])]


def together(pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """The arrays of a prompt's pictures as a processor gives them: tiles of one prompt side by side."""
    if not pictures:
        return {}
    names = pictures[0].arrays
    axis = 1 if "pixel_attention_mask" in names else 0
    return {
        name: torch.from_numpy(np.concatenate([each.arrays[name] for each in pictures], axis)).to(DEVICE)
        for name in names
    }
