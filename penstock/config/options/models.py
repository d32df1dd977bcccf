"""Options of the model: source, formats and data type."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from penstock.config.describe import option, option_group


@option_group
class ModelOptions:
    """Options of the model: source, formats and data type."""

    model: Annotated[
        str | None,
        option(
            "Model directory or Hugging Face model id. Default: the bundled demo model.",
            "Model",
            positional=True,
        ),
    ] = None
    runner: Annotated[
        Literal["auto", "generate", "pooling", "both"],
        option(
            "What the model is served for: generate (text), pooling (vectors, scores or labels), or both, of "
            "a model that generates text. auto: what its files say.",
            "Model",
        ),
    ] = "auto"
    served_model_name: Annotated[
        list[str] | None,
        option("Model names that clients may use; responses carry the first. Default: MODEL.", "Model"),
    ] = None
    model_alias: Annotated[
        list[Annotated[str, Meta(pattern=r"^[^=]{1,256}=.+\Z")]] | None,
        option(
            "Other names of served models and adapters, for clients that ask for fixed ones, such as "
            "'claude-*=NAME'. PATTERN may have *, ? and [abc]; exact names come first, then the first that "
            "fits.",
            "Model",
            metavar="PATTERN=NAME",
            allowed="PATTERN=NAME",
        ),
    ] = None
    revision: Annotated[str | None, option("Branch, tag or commit of a Hugging Face model id.", "Model")] = (
        None
    )
    tokenizer: Annotated[
        str | None, option("Directory or Hugging Face id with a tokenizer. Default: the model's.", "Model")
    ] = None
    chat_template: Annotated[
        str | None,
        option("File with a Jinja chat template. Default: the model's.", "Model", metavar="FILE"),
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        option(
            "Variables of the chat template, as a JSON object, such as '{\"enable_thinking\": false}', for "
            "requests that do not set them.",
            "Model",
            metavar="JSON",
        ),
    ] = None
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "none",
            "apertus",
            "cohere_command3",
            "cohere_command4",
            "command_r",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "deepseek_v41",
            "dots",
            "ernie45",
            "functionary_v31",
            "functionary_v32",
            "functiongemma",
            "gemma4",
            "gigachat3",
            "glm4",
            "glm45",
            "glm47",
            "granite",
            "granite-20b-fc",
            "granite4",
            "hermes",
            "hunyuan_a13b",
            "hy_v3",
            "hy_v3_opensource",
            "internlm",
            "jamba",
            "kimi_k2",
            "kimi_k3",
            "lfm2",
            "ling3",
            "llama3_json",
            "llama4_json",
            "llama4_pythonic",
            "longcat",
            "mimo",
            "minicpm5",
            "minimax_m2",
            "minimax_m3",
            "mistral",
            "muse_glimmer",
            "nemotron_json",
            "olmo3",
            "openai",
            "phi4_mini_json",
            "plamo3",
            "poolside_v1",
            "pythonic",
            "qwen3_coder",
            "qwen3_json",
            "qwen3_xml",
            "seed_oss",
            "step3",
            "step3p5",
            "step5",
        ],
        option(
            "Format of the model's tool calls; auto: detected from its chat template and type.",
            "Model",
            metavar="FORMAT",
        ),
    ] = "auto"
    json_whitespace: Annotated[
        Literal["compact", "flexible"],
        option(
            "Whitespace that grammars for JSON allow (structured output, forced tool calls). compact: one "
            "space after a comma and a colon; flexible: up to 64 spaces and line breaks between any parts.",
            "Model",
        ),
    ] = "compact"
    reasoning_parser: Annotated[
        Literal[
            "auto",
            "none",
            "apertus",
            "cohere_command3",
            "cohere_command4",
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v4",
            "deepseek_v41",
            "ernie45",
            "gemma4",
            "glm45",
            "glm47",
            "granite",
            "granite_thinking_parser",
            "holo2",
            "hunyuan_a13b",
            "hy_v3",
            "kimi_k2",
            "kimi_k3",
            "ling3",
            "mimo",
            "minicpmv",
            "minimax_m2",
            "minimax_m3",
            "mistral",
            "nemotron_v3",
            "olmo3",
            "openai_gptoss",
            "plamo3",
            "poolside_v1",
            "qwen3",
            "seed_oss",
            "step3",
            "step3p5",
            "step5",
            "think",
        ],
        option(
            "Format of the model's reasoning, which responses carry apart from the content. think: "
            "between <think> and </think>; auto: detected from the chat template and the model's type.",
            "Model",
            metavar="FORMAT",
        ),
    ] = "auto"
    reasoning_effort_map: Annotated[
        str | None,
        option(
            "JSON object: what a request's reasoning effort stands for. A text takes its place in the chat "
            "template, for templates that do not know it; a number is the budget of reasoning, in tokens, "
            'of requests without one. Example: \'{"minimal": "low", "low": 1024, "medium": 8192}\'.',
            "Model",
            metavar="JSON",
        ),
    ] = None
    generation_config: Annotated[
        Literal["auto", "none"],
        option(
            "Default sampling parameters. auto: from the model's generation_config.json, whose "
            "max_new_tokens also bounds every request's output; none: OpenAI's defaults.",
            "Model",
        ),
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        option("Maximum context length (prompt and output), in tokens. Default: the model's.", "Model"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Data type of weights and KV cache. auto: the model's on a GPU, float32 on a CPU.", "Model"),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        option(
            "Format of the weights. auto: safetensors, else PyTorch .bin files; safetensors: no .bin "
            "files; dummy: random weights, from config.json alone.",
            "Model",
        ),
    ] = "auto"
    seed: Annotated[
        int,
        option(
            "Random seed for the weights of --load-format dummy and for vLLM's engine. Requests have "
            "their own seeds.",
            "Model",
            ge=0,
        ),
    ] = 0
