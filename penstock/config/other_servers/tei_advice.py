"""What the flags of Hugging Face's Text Embeddings Inference are here."""

from __future__ import annotations

from penstock.config.other_servers.known_flag import Advice, IgnoredFlag, MappedFlag, Unsupported

_REQUESTS = "requests are bounded by --max-request-bytes, and by 4,096 inputs each"
_FILES = "the files of a model say how its vectors are made: modules.json and those it names"

ADVICE: dict[str, tuple[str, Advice]] = {
    "--model-id": ("1", MappedFlag("MODEL", "the first argument")),
    "--hostname": ("1", MappedFlag("--host")),
    "--max-batch-tokens": ("1", MappedFlag("--max-num-batched-tokens")),
    "--max-batch-requests": ("1", MappedFlag("--max-num-seqs")),
    "--max-concurrent-requests": ("1", MappedFlag("--max-num-queued-reqs", "per engine")),
    "--tokenization-workers": ("1", MappedFlag("--api-server-count", "processes that tokenize")),
    "--payload-limit": ("1", MappedFlag("--max-request-bytes")),
    "--cors-allow-origin": ("+", MappedFlag("--allowed-origins")),
    "--json-output": ("0", MappedFlag("--log-format json")),
    "--prometheus-port": ("1", IgnoredFlag("/metrics has the port of all routes")),
    "--disable-spans": ("0", IgnoredFlag("spans are made with --otlp-endpoint alone")),
    "--max-client-batch-size": ("1", IgnoredFlag(_REQUESTS)),
    "--huggingface-hub-cache": ("1", Unsupported("HF_HUB_CACHE is the directory of downloads")),
    "--hf-api-token": ("1", Unsupported("HF_TOKEN gives access to gated models")),
    "--auto-truncate": ("0", Unsupported("requests say truncate, or truncate_prompt_tokens")),
    "--default-prompt": ("1", Unsupported("prompts are those of config_sentence_transformers.json")),
    "--default-prompt-name": ("1", Unsupported("default_prompt_name of config_sentence_transformers.json")),
    "--dense-path": ("1", Unsupported(_FILES)),
    "--pooling": ("1", Unsupported(_FILES)),
}
"""Number of values, and advice, by name. A name that another server has as well stands in its table."""
