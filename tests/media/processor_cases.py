"""Compares pictures in prompts with the processor's own call; ``python -m tests.media.processor_cases DIR``.

A process of its own: it imports transformers without PyTorch, as a media worker does. Prints JSON by family.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from penstock.config.errors import ConfigError
from penstock.media.processor import HfProcessor, go_without_torch
from tests.media.families import FAMILIES

SIZES = [(50, 70), (90, 40)]


def case(directory: Path) -> dict[str, Any]:
    ours = HfProcessor(str(directory), {})
    description = ours.description
    images = [
        Image.fromarray(np.random.default_rng(each).integers(0, 255, (height, width, 3), np.uint8))
        for each, (width, height) in enumerate(SIZES)
    ]
    mark = description.placeholder
    theirs = ours._processor(text=f"Look:\n{mark}\n and {mark}{'?'}", images=images, return_tensors="np")
    around = f"{description.before}{mark}{description.after}"
    text = f"Look:\n{around}\n and {around}?"
    tokenizer = ours._processor.tokenizer
    placeholder = tokenizer.convert_tokens_to_ids(mark)
    prepared = [ours.prepare(image, "", 1) for image in images]
    spliced: list[int] = []
    left = iter(prepared)
    for token in tokenizer(text)["input_ids"]:
        spliced += np.frombuffer(next(left).facts.ids, "<i4").tolist() if token == placeholder else [token]
    first = {name: array.shape for name, array in prepared[0].arrays.items()}
    low = ours.prepare(images[0], ours.takes_detail("low"), 1)
    return {
        "description": [mark, description.before, description.after, description.processor],
        "equal": spliced == np.asarray(theirs["input_ids"]).reshape(-1).tolist(),
        "arrays": first,
        "pixels": _same_pixels(prepared, np.asarray(theirs["pixel_values"])),
        "features": [each.facts.features for each in prepared],
        "tokens": [len(each.facts.ids) // 4 for each in prepared],
        "grids": [each.facts.grid for each in prepared],
        "low": low.facts.features,
        "digest": ours.digest == HfProcessor(str(directory), {}).digest,
    }


def _same_pixels(prepared: list[Any], theirs: np.ndarray[Any, Any]) -> bool:
    if theirs.ndim == 5 and len(theirs) == len(prepared):  # those with fewer tiles than another are padded
        return all(
            np.array_equal(each.arrays["pixel_values"][0], padded[: each.arrays["pixel_values"].shape[1]])
            for each, padded in zip(prepared, theirs, strict=True)
        )
    if theirs.ndim == 5:
        return all(
            np.array_equal(each.arrays["pixel_values"][0], theirs[0, first : first + count])
            for each, first, count in _tiles(prepared)
        )
    return np.array_equal(np.concatenate([each.arrays["pixel_values"] for each in prepared]), theirs)


def _tiles(prepared: list[Any]) -> list[tuple[Any, int, int]]:
    found, first = [], 0
    for each in prepared:
        count = each.arrays["pixel_values"].shape[1]
        found.append((each, first, count))
        first += count
    return found


def refused(directory: Path, arguments: dict[str, Any]) -> str:
    try:
        HfProcessor(str(directory), arguments)
    except ConfigError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    go_without_torch()
    results: dict[str, Any] = {}
    for name, make in FAMILIES.items():
        (folder / name).mkdir()
        make(folder / name)
        results[name] = case(folder / name)
    results["kwargs"] = refused(folder / "llava", {"size": {"nonsense": 1}})
    results["other"] = (
        HfProcessor(str(folder / "qwen2_vl"), {"max_pixels": 28 * 28})
        .prepare(Image.new("RGB", (200, 200)), "", 1)
        .facts.features
    )
    (folder / "llava" / "processor_config.json").write_text('{"processor_class": "NoProcessor"}')
    results["unknown"] = refused(folder / "llava", {})
    results["torch"] = sys.modules.get("torch") is not None
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
