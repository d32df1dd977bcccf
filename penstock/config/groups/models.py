"""Options of which model is served, and how it is read."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.config.describe import option


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of which model is served, and how it is read."""

    model: Annotated[
        str | None,
        option(
            "Model directory or Hugging Face hub id; the bundled demo model when absent.",
            "Model",
            positional=True,
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        option("Names clients may use for the model, the first one is reported; default: MODEL.", "Model"),
    ] = None
    revision: Annotated[str | None, option("Branch, tag or commit of a hub id.", "Model")] = None
    tokenizer: Annotated[
        str | None, option("Directory with tokenizer.json, when it is not the model's.", "Model")
    ] = None
    chat_template: Annotated[
        str | None,
        option("File with a Jinja chat template that replaces the model's.", "Model", metavar="FILE"),
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama3_json", "none"],
        option("How the model writes tool calls; auto: what its chat template shows.", "Model"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "none"],
        option(
            "How the model marks its reasoning, which replies carry apart from the content; think: <think> "
            "and </think>; auto: what its chat template shows.",
            "Model",
        ),
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "none"],
        option("auto: sampling defaults from the model's generation_config.json; none: OpenAI's.", "Model"),
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        option("Longest prompt plus output, in tokens; default: what the model allows.", "Model"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Type of weights and KV cache; auto: the model's on a GPU, float32 on a CPU.", "Model"),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        option(
            "auto: safetensors, or PyTorch's .bin where a directory has no other; safetensors: only these; "
            "dummy: random weights, made from config.json alone.",
            "Model",
        ),
    ] = "auto"
    seed: Annotated[
        int, option("Seed of what is not seeded by a request (weights of a dummy model).", "Model", ge=0)
    ] = 0
