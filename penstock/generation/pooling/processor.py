"""Checks what requests for vectors, scores or labels ask for against the served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.config.serve import ServeConfig
from penstock.engine.pooling.description import PoolingDescription
from penstock.generation.input_processor import InputProcessor
from penstock.http.errors import ApiError, refused
from penstock.wire.pooling import TASK_NAMES, PoolingInfo, PoolingTask


class PoolingProcessor:
    """The served model's tasks, prompts and labels, and the checks that need them."""

    def __init__(
        self,
        config: ServeConfig,
        inputs: InputProcessor,
        info: PoolingInfo | None,
        described: PoolingDescription | None,
    ) -> None:
        """``info``: of the engines; None: they make text alone. ``described``: by the model's files."""
        self.config = config
        self.inputs = inputs
        """Decodes bodies, and checks model names and unsupported fields."""
        self.info = info
        self._described = described

    @property
    def model(self) -> str:
        """The name that replies report."""
        return self.inputs.model_info.names[0]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest input."""
        own = 0 if self.info is None else self.info.max_tokens
        return own or self.inputs.model_info.max_model_len

    @property
    def normalizes(self) -> bool:
        """Whether vectors have the length 1 unless a request says otherwise."""
        return self._described is None or self._described.normalizes

    @property
    def pools_prompt(self) -> bool:
        """Whether the tokens of a prompt count in the vector."""
        return self._described is None or self._described.pools_prompt

    @property
    def labels(self) -> Sequence[str]:
        """Names of the classifier's labels."""
        named = () if self._described is None else self._described.labels
        count = 0 if self.info is None else self.info.labels
        return named if len(named) == count else [f"LABEL_{index}" for index in range(count)]

    @property
    def prompts(self) -> Mapping[str, str]:
        """Texts that come before inputs, by name."""
        return {} if self._described is None else self._described.prompts

    @property
    def similarity(self) -> str:
        """How vectors are compared: cosine, dot, euclidean or manhattan."""
        return "cosine" if self._described is None else self._described.similarity

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served, and for a LoRA adapter."""
        self.inputs.require_model(name)
        if name is not None and (served := self.inputs.served_name(name)) not in self.inputs.model_info.names:
            raise ApiError(400, f"{served!r} is a LoRA adapter, which makes text alone.", param="model")

    def require_task(self, *tasks: PoolingTask) -> PoolingTask:
        """The first of ``tasks`` that the model has. Raises ApiError if it has none of them."""
        offered = () if self.info is None else self.info.tasks
        for task in tasks:
            if task in offered:
                return task
        wanted = " or ".join(TASK_NAMES[task] for task in tasks)
        has = ", ".join(self.info.names) if self.info is not None else "generate (see --runner)"
        raise ApiError(
            400,
            f"This route needs a model for {wanted}; {self.model!r} is one for {has}.",
            param="model",
            code="task_not_supported",
        )

    def check_dimensions(self, dimensions: int | None) -> int:
        """``dimensions`` of a request, 0 for all. Raises ApiError."""
        if dimensions is None:
            return 0
        width = 0 if self.info is None else self.info.width
        if not 1 <= dimensions <= width:
            raise refused(f"`dimensions` is {dimensions}, must be 1 to {width}.", "dimensions")
        return dimensions if dimensions < width else 0

    def prompt(self, name: str | None) -> str:
        """The text before each input. ``name``: of a prompt of the model; None: its default. Raises
        ApiError."""
        prompts = self.prompts
        if name is None:
            name = None if self._described is None else self._described.default_prompt
            return "" if name is None else prompts.get(name, "")
        if name not in prompts:
            known = ", ".join(map(repr, sorted(prompts))) or "none"
            raise refused(f"`prompt_name` is {name!r}, the model has: {known}.", "prompt_name")
        return prompts[name]
