"""Reads the files of a LoRA adapter, in PEFT's format, and checks whether they suit a model.

Everything in them is hostile: what is read is bounded before it is read, and errors name what is wrong.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.adapters.adapter_directory import READ_BYTES, AdapterDirectory, AdapterFile
from penstock.adapters.errors import AdapterError
from penstock.adapters.peft_config import CONFIG_FILE, PeftConfig, parse_peft_config
from penstock.adapters.safetensors_header import (
    LENGTH_BYTES,
    MAX_FILE_BYTES,
    TensorView,
    parse_header,
    parse_header_length,
)
from penstock.wire.messages import LoraInfo

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 22
DIGEST_BYTES = 32

PREFIX = "base_model.model."
"""What PEFT puts before a layer's path in the model."""
TEXT_PART = re.compile(r"(?:model\.(?:language_model|text_model)|language_model\.model)\.")
"""What stands in a layer's path for ``model.`` if the adapter was trained on a model with image input."""
_WEIGHT = re.compile(r"(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")
_UNSUPPORTED = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding_": "adapters of embeddings are not supported",
    "modules_to_save": "modules_to_save is not supported",
    "original_module": "modules_to_save is not supported",
    "lora_A.bias": "biases are not supported",
    "lora_B.bias": "biases are not supported",
    "base_layer": "weights of the base model are not supported",
}
"""Why a tensor whose name contains a key is refused."""


@dataclass(slots=True, frozen=True)
class LoraPair:
    """The weights of one layer, which adds ``scaling · B · A · x`` to its output."""

    a: TensorView
    """[rank, input features]"""
    b: TensorView
    """[output features, rank]"""
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(slots=True, frozen=True)
class AdapterFiles:
    """What an adapter's files contain."""

    digest: str
    """Hash of all bytes of both files, hexadecimal."""
    rank: int
    """Largest rank of its layers."""
    modules: dict[str, LoraPair]
    """Pairs of tensors by a layer's path in the model, such as ``model.layers.0.self_attn.q_proj``."""
    size: int
    """Bytes of its tensors."""


@dataclass(slots=True, frozen=True)
class ReadAdapter:
    """An adapter in memory."""

    files: AdapterFiles
    data: bytearray
    """The bytes of all tensors; :class:`TensorView` counts from its beginning."""


def describe_adapter(path: str, info: LoraInfo | None = None) -> AdapterFiles:
    """What the adapter in the directory ``path`` contains; its weights are not kept.

    ``path`` is absolute and without symbolic links. With ``info``, it is checked before its weights are read.
    Reads all of both files. Raises AdapterError.
    """
    with AdapterDirectory(path, follow_links=False) as directory:
        return _read(directory, info, keep=False).files


def read_adapter(path: str, digest: str, info: LoraInfo | None = None) -> ReadAdapter:
    """The adapter in the directory ``path``, whose files must have the digest ``digest``.

    With ``info``, it is checked before memory is taken for its weights. Raises AdapterError.
    """
    # The path may lead over other links on another host than that whose user named it: the digest decides.
    with AdapterDirectory(path, follow_links=True) as directory:
        adapter = _read(directory, info, keep=True)
    if adapter.files.digest != digest:
        raise AdapterError(f"its files have changed: their digest is {adapter.files.digest}, not {digest}")
    return adapter


def check_adapter(files: AdapterFiles, info: LoraInfo) -> None:
    """Raises AdapterError if an engine of ``info`` cannot run the adapter."""
    for name, pair in files.modules.items():
        if pair.rank > info.max_lora_rank:
            raise AdapterError(
                f"layer {name}: its rank is {pair.rank}; --max-lora-rank is {info.max_lora_rank}"
            )
        if not info.modules:
            continue
        features = info.modules.get(name)
        if features is None:
            raise AdapterError(f"layer {name}: the model has no such layer that an adapter can change")
        outputs, inputs = features
        _check_shape(name, "A", pair.a.shape, (pair.rank, inputs))
        _check_shape(name, "B", pair.b.shape, (outputs, pair.rank))


def _check_shape(layer: str, matrix: str, shape: tuple[int, ...], expected: tuple[int, int]) -> None:
    if shape != expected:
        raise AdapterError(
            f"layer {layer}: the shape of lora_{matrix} is {list(shape)}; the model needs {list(expected)}"
        )


def _read(directory: AdapterDirectory, info: LoraInfo | None, *, keep: bool) -> ReadAdapter:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with directory.open(CONFIG_FILE, MAX_CONFIG_BYTES) as file:
        text = bytes(file.read(file.size))
        file.check_end()
    # Its length first: otherwise bytes could move from one file to the other.
    digest.update(len(text).to_bytes(8, "little"))
    digest.update(text)
    config = parse_peft_config(text)
    if WEIGHTS_FILE not in directory and PICKLED_FILE in directory:
        raise AdapterError(
            f"{PICKLED_FILE}: pickled weights are not read; convert them to {WEIGHTS_FILE} with PEFT: "
            "PeftModel.from_pretrained(...).save_pretrained(DIRECTORY)"
        )
    with directory.open(WEIGHTS_FILE, MAX_FILE_BYTES) as file:
        start = bytes(file.read(min(file.size, LENGTH_BYTES)))
        length = parse_header_length(start, WEIGHTS_FILE, file.size)
        header = bytes(file.read(length))
        size = file.size - LENGTH_BYTES - length
        modules = _pair(parse_header(header, WEIGHTS_FILE, size), config)
        rank = max(pair.rank for pair in modules.values())
        files = AdapterFiles("", rank, modules, size)
        if info is not None:
            check_adapter(files, info)
        digest.update(start)
        digest.update(header)
        data = _read_data(file, size, digest, keep=keep)
        file.check_end()
    return ReadAdapter(replace(files, digest=digest.hexdigest()), data)


def _read_data(file: AdapterFile, size: int, digest: hashlib.blake2b, *, keep: bool) -> bytearray:
    """The next ``size`` bytes; none if they are not to be kept."""
    try:
        data = bytearray(size if keep else min(size, READ_BYTES))
    except MemoryError:
        raise AdapterError(f"{file.name}: there is no memory for its {size} bytes") from None
    view = memoryview(data)
    for start in range(0, size, READ_BYTES):
        count = min(READ_BYTES, size - start)
        part = view[start : start + count] if keep else view[:count]
        file.read_into(part)
        digest.update(part)
    return data if keep else bytearray()


def _pair(tensors: Mapping[str, TensorView], config: PeftConfig) -> dict[str, LoraPair]:
    """The matrices of each layer. Raises AdapterError."""
    layers: dict[str, dict[str, TensorView]] = {}
    for name, view in tensors.items():
        match = _WEIGHT.fullmatch(name)
        if match is None or any(part in name for part in _UNSUPPORTED):
            reason = next(
                (why for part, why in _UNSUPPORTED.items() if part in name), "it is no lora_A or lora_B"
            )
            raise AdapterError(f"{WEIGHTS_FILE}: tensor {name}: {reason}")
        if len(view.shape) != 2 or 0 in view.shape:
            raise AdapterError(
                f"{WEIGHTS_FILE}: tensor {name}: its shape is {list(view.shape)}; a matrix is needed"
            )
        layer = match["layer"].removeprefix(PREFIX)
        if text := TEXT_PART.match(layer):
            layer = f"model.{layer[text.end() :]}"
        matrices = layers.setdefault(layer, {})
        if match["matrix"] in matrices:
            raise AdapterError(f"{WEIGHTS_FILE}: tensor {name}: its layer has another lora_{match['matrix']}")
        matrices[match["matrix"]] = view
    if not layers:
        raise AdapterError(f"{WEIGHTS_FILE}: it has no tensors")
    return {layer: _pair_of(layer, matrices, config) for layer, matrices in layers.items()}


def _pair_of(layer: str, matrices: Mapping[str, TensorView], config: PeftConfig) -> LoraPair:
    for matrix in "AB":
        if matrix not in matrices:
            raise AdapterError(f"{WEIGHTS_FILE}: layer {layer}: it has no lora_{matrix}.weight")
    a, b = matrices["A"], matrices["B"]
    if a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"{WEIGHTS_FILE}: layer {layer}: the shapes of lora_A, {list(a.shape)}, and lora_B, "
            f"{list(b.shape)}, differ in rank"
        )
    return LoraPair(a, b, config.scaling(layer, a.shape[0]))
