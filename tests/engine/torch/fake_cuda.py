"""A CUDA device that computes nothing: its tensors have shapes, strides and dtypes, but no values.

PyTorch's FakeTensorMode propagates them, and refuses what needs values or several devices. On top of it
every operator is checked for what makes the host wait for a device: copies of memory that is not pinned,
copies that convert or gather, and operators whose result has a size that only the device knows.
"""

from __future__ import annotations

import ctypes
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from penstock.config.serve import ServeConfig
from penstock.engine.torch import engine as engine_module
from penstock.engine.torch import model as model_module
from penstock.engine.torch import model_loader, transfer
from penstock.engine.torch.attention import Kernel
from penstock.engine.torch.device import DevicePlace
from penstock.engine.torch.sampling import sampler_output
from tests.engine.torch.harness import make_model

CUDA = torch.device("cuda", 0)
CAPABILITY = 9, 0
"""Of an H100."""
TOKEN = 7
"""All that is sampled."""
LISTED = 5
"""Distinct tokens of every history."""
aten = torch.ops.aten


class FakeCuda(TorchDispatchMode):
    """Within it, tensors of :data:`CUDA` have no values. Notes what waits for them, and counts copies."""

    def __init__(self) -> None:
        super().__init__()
        _set_device_guard()
        self.waits: list[str] = []
        """Operators for which the host waits, with the lines that call them."""
        self.copies: Counter[str] = Counter()
        """Asynchronous copies: to the "device" and to the "host"."""
        self.operators = 0
        """On the device."""
        self._watches = False
        self._mode = FakeTensorMode()
        self._pinned: list[Any] = []
        """Storages of pinned memory."""

    def __enter__(self) -> FakeCuda:
        self._mode.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._mode.__exit__(*raised)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What must not wait."""
        self._watches = True
        yield
        self._watches = False
        assert not self.waits, "\n".join(self.waits)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default and not isinstance(args[0], FakeTensor):
            with _disable_current_modes():
                return func(*args)  # NumPy reads what was copied to the host
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            like = args[0]
            return self._pin(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype))
        if func.namespace == "aten":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is aten._grouped_mm.default and not _has_grouped_kernel(args[0]):
            self._wait(func, "sizes are read where there is no kernel")
            return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))  # PyTorch's stand-in refuses it
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self._wait(func, type(error).__name__)
            raise
        if kwargs.get("pin_memory"):
            self._pin(result)
        if not self._watches:
            return result
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
        on_device = [each for each in tensors if each.device.type == "cuda"]
        self.operators += bool(on_device)
        # a CPU tensor without dimensions is passed to a kernel like a number
        if on_device and any(each.device.type == "cpu" and each.dim() for each in tensors):
            self._cross(func, args, kwargs, result)
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            indexes = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indexes):
                self._wait(func, "a mask as an index: the number of its elements is read")
        return result

    def _cross(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        if func is aten._to_copy.default:
            target, source, asynchronous = result, args[0], kwargs.get("non_blocking", False)
        elif func is aten.copy_.default:
            target, source, asynchronous = (*args, False)[:3]
        else:
            self._wait(func, "tensors of several devices")
            return
        to_device = target.device.type == "cuda"
        host = source if to_device else target
        if not asynchronous:
            self._wait(func, "a blocking copy")
        elif host.untyped_storage() not in self._pinned:
            self._wait(func, "a copy of memory that is not pinned")
        elif source.dtype != target.dtype or not host.is_contiguous():
            self._wait(func, "a copy that converts or gathers on the host")
        else:
            self.copies["device" if to_device else "host"] += 1

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(tensor.untyped_storage())
        return tensor

    def _wait(self, func: Any, why: str) -> None:
        if self._watches:
            lines = [
                f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
                for frame in traceback.extract_stack()
                if "/penstock/engine/" in frame.filename or "/transformers/" in frame.filename
            ]
            self.waits.append(" <- ".join([f"{func}: {why}", *reversed(lines[-3:])]))


class FakeEvent:
    """Everything before it is done."""

    def record(self) -> None:
        """Nothing to note."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


def _has_grouped_kernel(values: Tensor) -> bool:
    return values.dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in (9, 10)


def _set_device_guard() -> None:
    """Let PyTorch without CUDA guard CUDA devices, by what guards a CPU: by nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    cpu, cuda = 0, 1  # of c10::DeviceType
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    if not guards[cuda]:
        guards[cuda] = guards[cpu]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The device; models are loaded from real files."""
    fake = FakeCuda()
    read_model: Callable[..., Any] = model_loader._read_model
    to_host = transfer.to_host

    def load(*arguments: Any) -> Any:
        with _disable_current_modes():
            return read_model(*arguments)

    def move(model: Any, device: torch.device) -> Any:
        def empty(tensor: Tensor) -> Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

        return model._apply(empty)

    def read_as(value: int, tensor: Tensor) -> Tensor:
        copy = to_host(tensor)
        with _disable_current_modes():
            return torch.full(copy.shape, value, dtype=copy.dtype)

    monkeypatch.setattr(model_loader, "_read_model", load)
    monkeypatch.setattr(transformers.PreTrainedModel, "to", move)
    monkeypatch.setattr(sampler_output, "to_host", partial(read_as, TOKEN))
    monkeypatch.setattr(transfer, "to_host", partial(read_as, LISTED))

    def attend(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        return query.new_empty((*query.shape[:2], value.shape[-1]))

    def capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        before = fake.copies.total()
        with fake.step():
            output = call()
        assert fake.copies.total() == before, "a recording would repeat a copy, of other memory by then"
        return lambda: output

    monkeypatch.setattr(model_module, "find_kernel", lambda device: Kernel(attend, lambda *shape: 64))
    monkeypatch.setattr(model_module, "find_capture", lambda device: capture)
    monkeypatch.setattr(engine_module, "place_rank", lambda config, rank: DevicePlace(CUDA, 1))
    # transformers leaves out some of what makes the host wait where it finds a fake tensor
    monkeypatch.setattr(transformers.utils.import_utils, "is_fake_tensor", lambda tensor: False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "fake")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 << 30)
    with fake:
        yield fake


def fake_config(**options: Any) -> ServeConfig:
    return ServeConfig(**({"max_num_seqs": 4, "kv_cache_memory": 8 << 20, "threads": 1} | options))


def make_real_model(kind: str, directory: Path, **changes: Any) -> None:
    """:func:`tests.engine.torch.harness.make_model`, on the CPU."""
    with _disable_current_modes():
        make_model(kind, directory, **changes)
