"""Has vLLM replace its weights, by the calls of its own with which its workers read a checkpoint again, or
receive tensors from a trainer.

vLLM checks names and shapes while it copies, and takes a checkpoint that lacks tensors. So what can be told
from headers is checked before. The engine also keeps a label of its weights: a successor of this process,
which knows nothing of them, tells by it whether they are those of the start.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.errors import AdapterError
from penstock.adapters.safetensors_header import TensorView
from penstock.config.serve import ServeConfig
from penstock.engine.attach.attached_core import AttachedCore, CallFailed
from penstock.engine.attach.base_shapes import PLAIN_DTYPES
from penstock.engine.weights.tensor_files import StoredTensor, TensorFiles, shown
from penstock.engine.weights.weight_file import WeightFile
from penstock.engine.weights.weight_loader import BrokenWeights, WeightPlan
from penstock.wire.vllm.messages import EngineLost
from penstock.wire.weights.desired import DEFAULT_VERSION, TRANSFER, WeightSource

READ_TIMEOUT_S = 3600.0
"""How long vLLM may read a checkpoint; as long as a request may wait for it."""
_OWN_NUMBER = re.compile("^dp[0-9]+:")
"""How names of tensors begin in vLLM's checksums: with what the engine is among others. Its workers' places
follow."""
ONLY_WHOLE = (
    "vLLM's engine takes whole models, each from one path: not several paths, nor tensors, nor whole: false"
)
SENT_ONCE = (
    "a trainer sends these weights, and only once: have it send them again, under another weight_version"
)
CACHE_IN_USE = "vLLM cannot empty its prefix cache, as requests use it; try again"
ANOTHER_START = (
    "the weights that vLLM was started with cannot be read again: with --revision it would take those of "
    "another revision"
)


class ExpectedTransfer(msgspec.Struct, frozen=True):
    """What a trainer is about to send."""

    path: str
    """That of the source."""
    update_info: Any
    """What vLLM's workers need to know of it."""
    timeout_s: float


class AttachedWeightPlan:
    """A checkpoint that has been checked, or a transfer that is expected."""

    def __init__(self, source: WeightSource | None, count: int) -> None:
        """``source``: None: the weights of the start. ``count``: its tensors."""
        self.source = source
        self.count = count

    def close(self) -> None:
        """No file is open."""


class AttachedWeightLoader:
    """Replaces the weights of one engine, see :class:`penstock.engine.weights.weight_loader.WeightLoader`."""

    def __init__(
        self,
        core: AttachedCore,
        model_dir: str,
        start: str | None,
        links_dir: str,
        restore_adapters: Callable[[], None],
    ) -> None:
        """``start``: see :func:`start_of`. ``links_dir``: made here; what an earlier process has left there
        is removed. ``restore_adapters``: vLLM has forgotten them."""
        self._core = core
        self._model_dir = Path(model_dir)
        self._start = start
        self._links_dir = links_dir
        self._remove(links_dir)
        self._restore_adapters = restore_adapters
        self._present: str | None = start
        """What vLLM has read last; it reads it again after a sleep without weights. None: it cannot."""
        self.is_sent = False
        """Whether a trainer has sent the present weights."""
        self._expected: ExpectedTransfer | None = None
        self._directory: str | None = None
        """That of ``_present``, if it was made here."""

    @cached_property
    def _known(self) -> dict[str, TensorView]:
        """The tensors of MODEL's own files; empty if there are none here that can be read."""
        known: dict[str, TensorView] = {}
        for path in sorted(self._model_dir.glob("*.safetensors")):
            with suppress(ValueError), WeightFile(path) as file:
                known |= file.tensors
        return known

    def expect(self, transfer: ExpectedTransfer) -> None:
        """A trainer is about to send this, and not what was expected before."""
        self._expected = transfer

    def plan(self, sources: Sequence[WeightSource]) -> AttachedWeightPlan:
        if not sources:
            if self._start is None:
                raise ValueError(ANOTHER_START)
            return AttachedWeightPlan(None, 0)
        if len(sources) > 1 or sources[0].is_part:
            raise ValueError(ONLY_WHOLE)
        if sources[0].path.startswith(TRANSFER):
            self._find_expected(sources[0].path)
            return AttachedWeightPlan(sources[0], 0)
        files = TensorFiles(sources)
        self._check(files.tensors)
        return AttachedWeightPlan(sources[0], files.count)

    def _find_expected(self, path: str) -> ExpectedTransfer:
        """Raises ValueError."""
        expected = self._expected
        if expected is None or expected.path != path:
            raise ValueError(SENT_ONCE)
        return expected

    def _check(self, found: Mapping[str, StoredTensor]) -> None:
        """Raises ValueError for tensors other than MODEL's own. Those that it does not have are vLLM's to
        judge: it leaves out some, such as a copy of what is tied."""
        missing = [name for name in self._known if name not in found]
        if missing:
            raise ValueError(f"no weights for {shown(missing)}; vLLM's engine takes whole models")
        for name, known in self._known.items():
            given = found[name]
            if given.shape != known.shape:
                raise ValueError(f"{name} is {list(given.shape)}, not {list(known.shape)}")
            if given.dtype != known.dtype and not {given.dtype, known.dtype} <= set(PLAIN_DTYPES):
                raise ValueError(f"{name} is of type {given.dtype}, not {known.dtype}")

    def load(self, plan: WeightPlan, *, drop_cache: bool, in_step: bool, tick: Callable[[], None]) -> int:
        assert isinstance(plan, AttachedWeightPlan)  # this loader has made it
        self._check_awake()
        if drop_cache and not self._core.call("reset_prefix_cache", True, True):  # running, connector
            raise ValueError(CACHE_IN_USE)
        if drop_cache:
            self._core.call("reset_encoder_cache")  # of pictures; running requests begin anew
        path = self._start if plan.source is None else plan.source.path
        assert path is not None  # it was planned
        # a vLLM that has no versions refuses this, and nothing has changed
        self._core.call("set_weight_version", path)
        expected = self._begin_transfer(path, tick) if path.startswith(TRANSFER) else None
        directory = None if plan.source is None or expected is not None else self._link(path)
        path = directory or path
        try:
            if expected is not None:
                self._receive(expected, tick)
            else:
                read_weights(self._core, path, tick, is_start=plan.source is None)
        except CallFailed as error:
            self._remove(directory)
            self._go_back(tick)
            raise ValueError(f"vLLM: {error}") from None
        self._forgot_adapters()
        self._remove(self._directory)
        self.is_sent = expected is not None
        self._present, self._directory = None if self.is_sent else path, directory
        return plan.count

    def _begin_transfer(self, path: str, tick: Callable[[], None]) -> ExpectedTransfer:
        """What all workers have been told to receive. Raises ValueError, with which nothing has changed."""
        expected, self._expected = self._find_expected(path), None
        self._call_workers(expected, "start_weight_update", tick)
        return expected

    def _receive(self, expected: ExpectedTransfer, tick: Callable[[], None]) -> None:
        """Raises CallFailed, EngineLost."""
        self._call_workers(expected, "update_weights", tick, update_info=expected.update_info)
        self._call_workers(expected, "finish_weight_update", tick)

    def _call_workers(
        self, expected: ExpectedTransfer, method: str, tick: Callable[[], None], **arguments: Any
    ) -> None:
        call = ("collective_rpc", method, None, (), arguments)
        self._core.call(*call, on_wait=tick, timeout_s=expected.timeout_s)

    def _go_back(self, tick: Callable[[], None]) -> None:
        """Read again what was there. Raises BrokenWeights."""
        if self._present is None:
            raise BrokenWeights(SENT_ONCE if self.is_sent else ANOTHER_START)
        try:
            read_weights(self._core, self._present, tick, is_start=self._present == self._start)
        except CallFailed as error:
            raise BrokenWeights(f"the weights before are lost as well: vLLM: {error}") from error
        self._forgot_adapters()

    def _forgot_adapters(self) -> None:
        try:
            self._restore_adapters()
        except AdapterError as error:
            raise BrokenWeights(f"the adapters are lost: {error}") from error

    def _link(self, path: str) -> str | None:
        """A directory for a file: vLLM takes directories only. None: it is one. Raises ValueError."""
        if os.path.isdir(path):
            return None
        try:
            os.makedirs(self._links_dir, exist_ok=True)
            directory = tempfile.mkdtemp(dir=self._links_dir)
            (Path(directory) / "model.safetensors").symlink_to(path)
        except OSError as error:
            raise ValueError(f"no link can be made in {self._links_dir}: {error.strerror}") from None
        return directory

    @staticmethod
    def _remove(directory: str | None) -> None:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Remove what was made for the present weights."""
        self._remove(self._links_dir)

    def checksum(self) -> str:
        self._check_awake()
        found = self._core.call("compute_weight_checksums")
        alike = [{_OWN_NUMBER.sub("", name): digest for name, digest in each.items()} for each in found]
        return sha256(msgspec.json.encode(alike, order="deterministic")).hexdigest()

    def _check_awake(self) -> None:
        if self._core.is_asleep:
            raise ValueError("the engine sleeps: wake it up first")


def start_of(config: ServeConfig, model_dir: str) -> str | None:
    """What vLLM was started with, as its workers find it; None: they cannot read it again."""
    if config.attach is None:
        return model_dir
    model = str(config.model)
    if os.path.isdir(model):
        return os.path.abspath(model)
    return None if config.revision is not None else model


def read_weights(core: AttachedCore, path: str, tick: Callable[[], None], *, is_start: bool) -> None:
    """Have all workers of an engine, whose version is not that of its start, read the model in the directory
    ``path``, a hub id for some starts. ``tick`` is called once a second. Raises CallFailed, EngineLost."""
    arguments = ("reload_weights", None, (), {"weights_path": path})
    core.call("collective_rpc", *arguments, on_wait=tick, timeout_s=READ_TIMEOUT_S)
    if is_start:
        core.call("set_weight_version", DEFAULT_VERSION)


def read_start_again(core: AttachedCore, start: str | None, on_wait: Callable[[], None]) -> None:
    """Bring an engine that is taken over back to the weights of its start, if it may have others. Raises
    EngineLost."""
    try:
        if core.call("get_weight_version", on_wait=on_wait) in (None, DEFAULT_VERSION):
            return
    except CallFailed:
        return  # then it cannot be told, either: weights are read by nothing that keeps no version
    try:
        if start is None:
            raise CallFailed(ANOTHER_START)
        read_weights(core, start, on_wait, is_start=True)
    except CallFailed as error:
        raise EngineLost(f"it may have other weights than at its start; restart it: {error}") from None
