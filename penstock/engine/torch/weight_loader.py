"""Replaces the weights of the torch engine's model in place, tensor by tensor.

Parameters keep their memory, so recorded CUDA graphs and all that refers to them stay valid, and no second
copy of the model is made: a tensor of the mapped file is copied into its parameter; of tensors that are fused
one parameter's are put together at a time. Adapters and a draft model stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.weight_map import Conversion, read_tensor
from penstock.engine.weights.sources import sources_to_read
from penstock.engine.weights.tensor_files import TensorFiles
from penstock.engine.weights.weight_loader import BrokenWeights, WeightPlan
from penstock.wire.weights.desired import WeightSource

DIVIDED_ELEMENTS = 1 << 22
"""Elements of tensors that several threads copy. Copies of smaller ones take a millisecond or two, and
threads wait as long for each other: with other work on two cores, 47 tensors of 7 MB take 3 to 6 ms in two
threads, 2 in one."""
CHECKED_BYTES = 1 << 24
"""Bytes that a checksum brings to the host at once."""

log = logging.getLogger(__name__)


class TorchWeightPlan:
    """Open files, and the sources that they make together with the present weights."""

    def __init__(
        self, files: TensorFiles, conversions: Sequence[Conversion], sources: Sequence[WeightSource]
    ) -> None:
        self.files = files
        self.conversions = conversions
        self.sources = list(sources)

    def close(self) -> None:
        self.files.close()


class TorchWeightLoader:
    """Loads weights into a model whose engine computes nothing meanwhile."""

    def __init__(
        self,
        model: PagedModel,
        start: WeightSource | None,
        drop_cache: Callable[[], None],
        meet: Callable[[Callable[[], None]], None],
    ) -> None:
        """``start``: the files that the model was loaded from; None: it cannot be again. ``drop_cache``
        forgets what was computed. ``meet(tick)`` waits for the other ranks."""
        self._model = model
        self._start = start
        self._drop_cache = drop_cache
        self._meet = meet
        self._sources: list[WeightSource] = []
        """What made the present weights, upon those of the start."""

    def plan(self, sources: Sequence[WeightSource]) -> TorchWeightPlan:
        plan = self._open(self._sources, sources)
        try:
            start = None if self._start is None else self._start.path
            self._model.weight_map.check_range(plan.conversions, plan.files.tensors, start)
        except BaseException:
            plan.close()
            raise
        return plan

    def _open(
        self, present: Sequence[WeightSource] | None, wanted: Sequence[WeightSource]
    ) -> TorchWeightPlan:
        """``present``: see :func:`sources_to_read`. Raises ValueError."""
        files = TensorFiles(sources_to_read(present, wanted, self._start))
        try:
            found = self._model.weight_map.conversions(files.tensors, files.named, whole=files.whole)
        except BaseException:
            files.close()
            raise
        return TorchWeightPlan(files, found, wanted)

    def load(self, plan: WeightPlan, *, drop_cache: bool, in_step: bool, tick: Callable[[], None]) -> int:
        assert isinstance(plan, TorchWeightPlan)  # this loader has made it
        count = plan.files.count
        try:
            self._copy(plan, tick)
        except Exception:
            self._restore(tick)
            raise
        finally:
            plan.close()
            if in_step:
                self._meet_others(tick)
        self._sources = plan.sources
        if drop_cache:
            self._drop_cache()
        return count

    def _meet_others(self, tick: Callable[[], None]) -> None:
        try:
            self._meet(tick)
        except Exception as error:
            raise BrokenWeights(f"ranks may have different weights: {error}") from error

    def _restore(self, tick: Callable[[], None]) -> None:
        """Bring back what a copy that has failed may have overwritten in part. Raises BrokenWeights."""
        try:
            self._read_again(None, tick)
        except Exception as error:
            raise BrokenWeights(f"the weights before are lost as well: {error}") from error

    def on_started(self) -> None:
        """The model has been loaded again, as it was at its start. Raises ValueError."""
        if self._sources:
            self._read_again([], lambda: None)

    def _read_again(self, present: Sequence[WeightSource] | None, tick: Callable[[], None]) -> None:
        plan = self._open(present, self._sources)
        try:
            self._copy(plan, tick)
        finally:
            plan.close()

    @torch.inference_mode()
    def _copy(self, plan: TorchWeightPlan, tick: Callable[[], None]) -> None:
        parameters, weight_map = self._model.parameters, self._model.weight_map
        tensors, threads = plan.files.tensors, torch.get_num_threads()
        try:
            for conversion in plan.conversions:
                for name, tensor in weight_map.convert(conversion, tensors, read_tensor):
                    if parameters is not None:
                        torch.set_num_threads(threads if tensor.numel() >= DIVIDED_ELEMENTS else 1)
                        parameters[name].copy_(tensor)
                tick()
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def checksum(self) -> str:
        parameters = self._model.parameters
        if parameters is None:
            raise ValueError("the model is asleep without its weights: wake it up first")
        digest = hashlib.sha256()
        for name, parameter in sorted(parameters.items()):
            dtype = str(parameter.dtype).removeprefix("torch.")
            digest.update(f"{name} {dtype} {list(parameter.shape)}\n".encode())
            whole = _bytes_of(parameter)
            for start in range(0, len(whole), CHECKED_BYTES):
                digest.update(whole[start : start + CHECKED_BYTES].cpu().numpy().data)
        return digest.hexdigest()


def _bytes_of(parameter: Tensor) -> Tensor:
    """uint8[...] of all bytes, in order."""
    return parameter.detach().contiguous().reshape(-1).view(torch.uint8)


def start_source(model_dir: str, load_format: str) -> WeightSource | None:
    """The files of the weights that a model is started with; None: they are in no safetensors file, or are
    unpacked when they are loaded."""
    directory = Path(model_dir).resolve()
    if load_format == "dummy" or not any(directory.glob("*.safetensors")):
        return None
    if json.loads((directory / "config.json").read_bytes()).get("quantization_config"):
        return None
    return WeightSource(str(directory))
