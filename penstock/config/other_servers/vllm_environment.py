"""Variables of vLLM's server: those that are honoured, and those that have no effect here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from penstock.config.introspect import Option
from penstock.config.other_servers.vllm_names import vllm_names

API_KEY = "VLLM_API_KEY"
HONOURED = {
    API_KEY: "api_key",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "keep_alive_timeout",
    "VLLM_LOG_STATS_INTERVAL": "log_interval",
    "VLLM_LOGGING_LEVEL": "log_level",
    "VLLM_IMAGE_FETCH_TIMEOUT": "media_fetch_timeout",
    "VLLM_MAX_IMAGE_PIXELS": "media_max_pixels",
}
"""Field of Penstock's options by variable; any source of Penstock's own wins over it."""

_LOG = "lines have one form, on standard error; --log-level sets the level"
_NO_TEXTS = "requests and replies are not logged"
_LIMIT = "limits are fixed, see docs/security.md"
_TOOLS = "tools run at the client"
_FORMATS = "--tool-call-parser sets the format of calls"
SERVER = {
    "VLLM_LOGGING_CONFIG_PATH": _LOG,
    "VLLM_LOGGING_STREAM": _LOG,
    "VLLM_LOGGING_PREFIX": _LOG,
    "VLLM_LOGGING_COLOR": _LOG,
    "VLLM_CONFIGURE_LOGGING": _LOG,
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": _NO_TEXTS,
    "VLLM_MAX_N_SEQUENCES": _LIMIT,
    "VLLM_MAX_COMPLETION_PROMPTS": _LIMIT,
    "VLLM_MAX_STOP_STRINGS": _LIMIT,
    "VLLM_MAX_NUM_BAD_WORDS": _LIMIT,
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": _LIMIT,
    "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT": _LIMIT,
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": _LIMIT,
    "VLLM_USE_MODELSCOPE": "models come from a directory or Hugging Face's hub",
    "VLLM_MODEL_REDIRECT_PATH": "give the model's directory",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--lora-dir lets requests load adapters",
    "VLLM_SERVER_DEV_MODE": "administrative routes need an API key, a unix socket or --allow-loopback-admin",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "engines that end are replaced",
    "VLLM_ENGINE_READY_TIMEOUT_S": "--startup-timeout is the limit",
    "VLLM_SKIP_MODEL_NAME_VALIDATION": "name further models with --served-model-name",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "--enable-request-id-headers returns the client's id",
    "VLLM_ENABLE_RESPONSES_API_STORE": "responses are stored unless --response-store off",
    "VLLM_ENABLE_COHERE_API": "there is no Cohere API",
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS": _TOOLS,
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": "the chat template renders all instructions",
    "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY": _TOOLS,
    "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS": _FORMATS,
    "VLLM_ENFORCE_STRICT_TOOL_CALLING": "a tool's own strict field decides",
    "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT": _FORMATS,
    "VLLM_SYSTEM_START_DATE": "the chat template has the date of the day",
    "VLLM_USE_RUST_FRONTEND": "Penstock has its own server",
    "VLLM_RUST_FRONTEND_PATH": "Penstock has its own server",
    "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "Penstock has its own server",
}
"""Variables that only ``vllm serve`` itself reads: what they would change is said here instead."""
EARLIER = {
    "VLLM_ATTENTION_BACKEND": "of earlier versions; it is --attention-backend behind --, with --engine vllm",
    "VLLM_USE_V1": "of earlier versions",
}
"""Variables that vLLM has no more, and scripts still set."""
SILENT = frozenset(
    {
        "VLLM_BUILD_COMMIT",
        "VLLM_BUILD_PIPELINE",
        "VLLM_BUILD_URL",
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "VLLM_DISABLE_LOG_LOGO",
        "VLLM_DOCKER_BUILD_CONTEXT",
        "VLLM_DO_NOT_TRACK",
        "VLLM_IMAGE_TAG",
        "VLLM_MAIN_CUDA_VERSION",
        "VLLM_NO_USAGE_STATS",
        "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX",
        "VLLM_SKIP_VERSION_SUFFIX",
        "VLLM_TARGET_DEVICE",
        "VLLM_USAGE_SOURCE",
        "VLLM_USAGE_STATS_SERVER",
        "VLLM_USE_FASTOKENS",
        "VLLM_USE_PRECOMPILED",
        "VLLM_USE_PRECOMPILED_RUST",
        "VLLM_USE_RUST_BENCH",
    }
)
"""Variables of vLLM's build, image, caches and usage statistics, which ask nothing of a server."""


def honoured(
    options: Iterable[Option], names: Collection[str], replaces_vllm: bool
) -> Iterator[tuple[Option, str]]:
    """The options that variables among ``names`` set. Every command takes the key; only one that replaces
    ``vllm serve`` takes the others."""
    by_field = {option.field: option for option in options}
    for name, field in HONOURED.items():
        if name in names and field in by_field and (replaces_vllm or name == API_KEY):
            yield by_field[field], name


def unheeded(names: Iterable[str], engine: str) -> list[str]:
    """One warning about the variables of vLLM's among ``names`` that have no effect with ``engine``; their
    values are not shown. vLLM's engine reads its own."""
    unneeded = SERVER | EARLIER
    known = sorted((vllm_names().variables | EARLIER.keys()).intersection(names) - HONOURED.keys() - SILENT)
    texts = [f"{name} ({unneeded[name]})" for name in known if name in unneeded]
    engines = [name for name in known if name not in unneeded]
    if engines and engine != "vllm":
        texts.append(f"{', '.join(engines)} (of vLLM's engine, for --engine vllm)")
    return [f"warning: variables of vLLM's without effect here: {'; '.join(texts)}"] if texts else []
