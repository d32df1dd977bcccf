"""The model: a Hugging Face causal LM with paged attention; its KV cache, LM head, forward pass and sleep."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch.attention import Layout, PagedAttention, find_kernel
from penstock.engine.torch.attention_metadata import dummy_attention_metadata, token_positions
from penstock.engine.torch.batch_invariance import head_rows, make_invariant, refuse_device
from penstock.engine.torch.cuda.decode_graphs import (
    Capture,
    DecodeGraphs,
    find_capture,
    padded_sizes,
    record_graphs,
)
from penstock.engine.torch.cuda.graph_memory import measure_graphs
from penstock.engine.torch.cuda.paged_layout import FILLING, DeviceTables
from penstock.engine.torch.expert_parallel import ExpertParallel
from penstock.engine.torch.experts import RouteRecorder, most_recorded
from penstock.engine.torch.families import llama4
from penstock.engine.torch.families.bloom import replace_attention
from penstock.engine.torch.lm_head import LMHead
from penstock.engine.torch.lora.lora_layers import LoraLayers
from penstock.engine.torch.lora.lora_plan import LoraPlan
from penstock.engine.torch.media.families import SEEING_FAMILIES
from penstock.engine.torch.media.features import Features
from penstock.engine.torch.media.language_part import LanguagePart
from penstock.engine.torch.memory import DeviceMemory, release_memory
from penstock.engine.torch.model_loader import Head, ModelShape, load_model
from penstock.engine.torch.out_of_memory import stating_shortage
from penstock.engine.torch.transfer import to_device
from penstock.engine.torch.weight_map import WeightMap

LESS_WEIGHTS = "take --dtype bfloat16, a smaller model, or a device with more free memory"
LESS_CACHE = "lower --kv-cache-memory or --gpu-memory-utilization, or end other processes on the device"
LESS_WORK = "lower --max-num-batched-tokens or --max-num-seqs, or end other processes on the device"

_instances = itertools.count()


class PagedModel:
    """A causal LM whose layers keep keys and values in a paged cache."""

    def __init__(
        self,
        model_dir: str,
        config: ServeConfig,
        shape: ModelShape,
        *,
        dtype: torch.dtype,
        device: torch.device,
        experts: ExpertParallel | None = None,
        head: Head = "text",
    ) -> None:
        """Load the weights; with ``experts``, only this rank's share of the experts. ``head``: one that makes
        no text has none of :attr:`head`, one that sees also takes pictures. Raises ConfigError
        when they cannot be read."""
        from transformers import AttentionInterface

        self._name = f"penstock_paged_{next(_instances)}"
        # transformers makes no mask for an attention function that registers none: this one masks by position
        AttentionInterface.register(self._name, self._attend)
        self._model_dir = model_dir
        self._config = config
        self._experts = experts
        self._kind: Head = head
        self._shape = shape
        self.dtype = dtype
        self.device = device
        self._cache_size = 0, 0
        self._attention: PagedAttention | None = None
        self._graphs: DecodeGraphs | None = None
        self._can_record = True
        self._whole: Any = None
        self._model: Any = None
        """The whole of it, or the part for text."""
        self._head: LMHead | None = None
        self._recorder: RouteRecorder | None = None
        self.lora: LoraLayers | None = None
        """None: the model runs no adapters, or is asleep without its weights."""
        self.parameters: dict[str, Tensor] | None = None
        """By the names with which the model was loaded; None: it is asleep without its weights."""
        self._weight_map: WeightMap | None = None
        self._multiple = 1
        """The rows of a forward pass are a multiple of it."""
        self._load_weights()

    def _load_weights(self) -> None:
        """Load the weights to the device, from files or, after sleep level 1, from host memory."""
        with stating_shortage(f"loading the weights of {self._model_dir}", LESS_WEIGHTS, self.device):
            self._load()
        if self.lora is not None:
            self.lora.allocate()
        self._head = self._make_head() if self._kind in ("text", "seeing") else None

    def _load(self) -> None:
        if self._model is None:
            whole = load_model(
                self._model_dir,
                self._config,
                dtype=self.dtype,
                device=self.device,
                attention=self._name,
                experts=self._experts,
                head=self._kind,
            )
            self.parameters = dict(whole.named_parameters(remove_duplicate=False))
            if self._weight_map is None:
                self._weight_map = WeightMap(
                    whole, self.parameters, (0, 1) if self._experts is None else self._experts.share
                )
            model = LanguagePart(whole) if self._kind == "seeing" else whole
            if model.config.model_type == "bloom":
                replace_attention(model, self._attend)
            elif model.config.model_type == "llama4_text":
                llama4.adapt(model)
            self._whole, self._model, self._recorder = whole, model, RouteRecorder(model)
            if self._config.enable_lora:
                self.lora = LoraLayers(model, self._config.max_loras, self._config.max_lora_rank)
            if self._config.batch_invariant:
                refuse_device(self.device)
                self._multiple = make_invariant(model)
        else:
            self._whole.to(self.device)

    def _make_head(self) -> LMHead:
        shape, projection = self._shape, self._model.get_output_embeddings()

        def make(projection: nn.Linear, fewest: int | None) -> LMHead:
            return LMHead(projection, shape.logits_scale, shape.logits_softcap, self.device, fewest)

        return make(projection, head_rows(make, projection) if self._config.batch_invariant else None)

    def make_cache(self, blocks: int, block_size: int, *, record: bool = True) -> None:
        """Allocate the KV cache, after the weights are loaded and before the first forward pass. ``blocks``
        includes the null block. ``record``: record decode steps as CUDA graphs where that is possible. Raises
        ConfigError when there is no memory for them."""
        self._cache_size = blocks, block_size
        self._graphs = None  # they refer to the cache before
        with stating_shortage(f"allocating a KV cache of {blocks} blocks", LESS_CACHE, self.device):
            self._attention = self._make_attention(self._shape, blocks, block_size)
        tables = self._attention.tables
        if record and tables is not None:
            with stating_shortage("recording CUDA graphs", LESS_CACHE, self.device):
                self._warm_up(tables)
                capture = self._find_capture()
                if capture is not None:
                    self._graphs = self._record(capture, self._sizes)

    @property
    def _sizes(self) -> list[int]:
        """Rows of the decode steps that are recorded."""
        return padded_sizes(min(self._config.max_num_seqs, most_recorded(self._model)))

    @property
    def _longest(self) -> int:
        """Positions of the longest history."""
        return self._config.max_model_len or self._shape.max_positions

    def make_passing_cache(self, blocks: int, block_size: int) -> PagedAttention:
        """Pages for :meth:`states`, ``blocks`` of them for all layers. Raises ConfigError when there is no
        memory for them."""
        with stating_shortage(f"allocating {blocks} blocks of keys and values", LESS_WORK, self.device):
            return self._make_attention(self._shape.passing(), blocks, block_size)

    def _make_attention(self, shape: ModelShape, blocks: int, block_size: int) -> PagedAttention:
        kernel, tables = find_kernel(self.device), None
        if kernel is not None:
            tables = DeviceTables(self._config.max_num_seqs, -(-self._longest // block_size), self.device)
        return PagedAttention(
            shape,
            blocks,
            block_size,
            dtype=self.dtype,
            device=self.device,
            kernel=kernel,
            tables=tables,
            batch_invariant=self._config.batch_invariant,
        )

    # -- CUDA graphs

    def _find_capture(self) -> Capture | None:
        """None: decode steps are not recorded."""
        # ranks that split experts exchange within a forward pass as many tokens as each has
        allowed = self._can_record and self._experts is None and not self._config.enforce_eager
        return find_capture(self.device) if allowed else None

    def _record(self, capture: Capture, sizes: list[int]) -> DecodeGraphs | None:
        assert self.attention.tables is not None
        return record_graphs(
            self._forward,
            capture,
            self.attention.tables,
            sizes=sizes,
            longest=self._longest,
            device=self.device,
        )

    def graph_bytes(self, memory: DeviceMemory) -> int:
        """Bytes that the CUDA graphs of :meth:`make_cache` will take. The model has a cache, without any."""
        tables, capture = self.attention.tables, self._find_capture()
        if tables is None or capture is None:
            return 0
        with stating_shortage("recording CUDA graphs", LESS_WORK, self.device):
            self._warm_up(tables)
            size = measure_graphs(self._record, capture, self._sizes, memory)
        self._can_record = size is not None
        return size or 0

    @torch.inference_mode()
    def _warm_up(self, tables: DeviceTables) -> None:
        """Compile the kernels: those for few tokens, whose histories are shared by programs, and for many."""
        for count in (1, FILLING + 1):
            layout = tables.null_layout(count, count, self._longest)
            zeros = torch.zeros_like(layout.positions)
            self.hidden(zeros, zeros, layout, zeros[:1])

    # -- sleep

    def sleep(self, *, drop_weights: bool) -> None:
        """Free the KV cache and the stacks of adapters, and drop the weights or move them to host memory
        (where they are already if the device is the CPU)."""
        self._attention = self._head = self._graphs = None
        if self.lora is not None:
            self.lora.free()
        if drop_weights:
            self._whole = self._model = self.lora = self.parameters = self._recorder = None
        else:
            self._whole.to("cpu")
        release_memory(self.device)

    def wake_up(self) -> None:
        """Load the weights, allocate an empty KV cache and record graphs. Raises ConfigError when the weights
        cannot be read or there is no memory; the model is then asleep as before."""
        dropped = self._model is None
        try:
            self._load_weights()
            self.make_cache(*self._cache_size)
        except BaseException:
            self.sleep(drop_weights=dropped)
            raise

    # -- the forward pass

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab_size

    @property
    def weight_map(self) -> WeightMap:
        """Which tensors of a checkpoint make which of the :attr:`parameters`."""
        assert self._weight_map is not None  # the model was loaded
        return self._weight_map

    @property
    def recorder(self) -> RouteRecorder:
        assert self._recorder is not None, "the model is asleep"
        return self._recorder

    @property
    def head(self) -> LMHead:
        assert self._head is not None, "the model is asleep"
        return self._head

    @property
    def sees(self) -> bool:
        """Whether the model takes pictures."""
        return self._kind == "seeing"

    @property
    def whole(self) -> Any:
        """transformers' model, with all the parts that it was loaded with."""
        assert self._whole is not None, "the model is asleep"
        return self._whole

    @property
    def max_positions(self) -> int:
        """Tokens of a history that the model takes."""
        return self._shape.max_positions

    @property
    def attention(self) -> PagedAttention:
        assert self._attention is not None, "make_cache was not called, or the model is asleep"
        return self._attention

    def _attend(self, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        return self.attention(*arguments, **options)

    def run(
        self,
        batch: Batch,
        tokens: Tensor,
        blocks: BlockTables,
        rows: Tensor,
        lora: LoraPlan | None = None,
        features: Features | None = None,
        *,
        rotary: NDArray[np.int64] | None = None,
        eager: bool = False,
    ) -> Tensor:
        """[S, H]: hidden states of a batch at ``rows`` of its T tokens, by a recorded graph if one takes it.

        tokens: int64[T]; rows: int64[S]; both on the device. ``rotary``: int64[T] or, in time, height and
        width, [3, T]: positions for the rotary embedding; None: those in the histories. ``eager``: by no
        graph. Otherwise like :meth:`hidden`.
        """
        positions = token_positions(batch)
        attention = self.attention
        flat = rotary is None or rotary.ndim == 1
        eager = eager or lora is not None or features is not None or not flat
        if self._graphs is not None and not eager and self._graphs.takes(batch):
            return self._graphs.run(tokens, batch.slots, positions, blocks, rotary).index_select(0, rows)
        reach = None
        if features is not None and SEEING_FAMILIES[self._whole.config.model_type].whole_spans:
            reach = features.reach(positions)
        places, layout = attention.layout_of(batch, blocks, positions, self.device, reach)
        if rotary is not None:
            places = to_device(rotary, self.device)
        return self.hidden(tokens, places, layout, rows, lora, features)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        rows: Tensor,
        lora: LoraPlan | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """[S, H]: hidden states at ``rows`` of a flat batch, for ``head``.

        tokens: int64[T]; positions: int64[T] or [3, T], for the rotary embedding; rows: int64[S]. Writes the
        keys and values of all T tokens to the cache.
        ``lora``: the adapters that run; their rows may overflow, and are then zero. ``features`` are in the
        place of some tokens' embeddings.
        """
        if self._experts is not None:
            self._experts.begin_forward(len(tokens), self.device)
        try:
            hidden = self._forward(tokens, positions, layout, lora, features).index_select(0, rows)
        finally:
            if self.lora is not None and lora is not None:
                self.lora.end()
        return hidden if lora is None else hidden.nan_to_num_(0.0, 0.0, 0.0)

    def states(self, batch: Batch, tokens: Tensor, blocks: BlockTables, pages: PagedAttention) -> Tensor:
        """[T, H]: the last hidden states of whole texts, which leave nothing in the cache. ``tokens``:
        int64[T], on the device; ``blocks``: of ``pages``, those of :meth:`make_passing_cache`."""
        places, layout = pages.layout_of(batch, blocks, token_positions(batch), self.device)
        kept, self._attention = self._attention, pages
        try:
            return self._forward(tokens, places, layout)[: len(tokens)]
        finally:
            self._attention = kept

    @property
    def labels(self) -> int:
        """Numbers that a :attr:`classifier` makes."""
        return int(self._model.config.num_labels)

    @property
    def classifier(self) -> Any:
        """The layer behind the last hidden states of a model with labels. Raises ConfigError if there is
        none."""
        for name in ("score", "classifier"):
            if hasattr(self._model, name):
                return getattr(self._model, name)
        raise ConfigError(f"{self._model_dir}: {type(self._model).__name__} has no layer for its labels")

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        lora: LoraPlan | None = None,
        features: Features | None = None,
    ) -> Tensor:
        """[T, H]: the last hidden states of all tokens."""
        self.attention.layout = layout
        self.attention.bounds_rows = lora is not None
        if self.lora is not None:
            self.lora.begin(lora)
        tokens, positions = (_padded(column, self._multiple) for column in (tokens, positions))
        model = self._model.base_model
        inputs = {"input_ids": tokens[None]}
        if features is not None:
            inputs = {"inputs_embeds": features.embed(model.get_input_embeddings(), tokens)[None]}
        output = model(**inputs, position_ids=positions.unsqueeze(-2), use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def dummy_run(self) -> None:
        """A forward pass for the other ranks' tokens, with one unused token of this rank."""
        attention = self.attention
        if attention.tables is not None:
            layout: Layout = attention.tables.null_layout(1, 0, 1)
        else:
            block_size = attention.keys[0].shape[2]
            layout = {
                geometry.kv_heads: dummy_attention_metadata(block_size, geometry, self.device)
                for geometry in attention.geometries
            }
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.hidden(zero, zero, layout, zero)


def _padded(column: Tensor, multiple: int) -> Tensor:
    """int64[..., T] with zeros, up to a multiple; rows that the layout does not have read and write no
    cache."""
    missing = -column.shape[-1] % multiple
    return pad(column, (0, missing)) if missing else column
