"""What the flags of ``vllm serve`` are here: one line per flag.

A flag of Penstock's own name needs no line. A flag of vLLM's engine without a line goes behind ``--``; with
one, the line is what it means to Penstock's own engines.
"""

from __future__ import annotations

from penstock.config.other_servers.known_flag import Advice, EngineFlag, IgnoredFlag, MappedFlag, Unsupported

_HOSTS = "engines on other hosts join at --coordinator tcp://HOST:PORT"
_ONE_ADDRESS = (
    "tcp://HOST:PORT, address and port in one, with a --cluster-key-file that penstock keys cluster makes"
)
_BALANCER = "API servers share one address and spread requests over all engines"
_DOCS = "--no-web-page switches the page off; the API's description needs a key where the API does"
_NO_TEXTS = "requests and replies are not logged; --access-log all logs one line for each"
_ONE_MEDIA_CACHE = "preprocessed pictures are always in one cache of the host's, --media-cache"
_VECTORS = MappedFlag("--runner pooling", alone=True, granted=("auto", "generate", "none"))
_POOLER = "the files of a model say how its vectors and labels are made: modules.json and config.json"
_SPECULATIVE = (
    "for vLLM's methods ngram, suffix and draft_model it has --speculative-method ngram, suffix and draft, "
    "with --speculative-tokens and --draft-model; other methods are vLLM's alone"
)
_NO_MORE = "it is of earlier versions"
_NO_CODE = "Penstock's server runs no code of its operator's; put a proxy in front"

ADVICE: dict[str, Advice] = {
    # -- another name ----------------------------------------------------------------------------------
    "--model": MappedFlag("MODEL", "the first argument"),
    "--kv-cache-memory-bytes": MappedFlag("--kv-cache-memory"),
    "--sse-keep-alive-interval": MappedFlag("--sse-keep-alive"),
    "--otlp-traces-endpoint": MappedFlag("--otlp-endpoint", "http://HOST:4318, OTLP over HTTP"),
    "--shutdown-timeout": MappedFlag("--drain-timeout"),
    "--h11-max-incomplete-event-size": MappedFlag("--max-header-bytes", "of a request's line and headers"),
    "--mm-processor-cache-gb": MappedFlag(
        "--media-cache", "in bytes, with units: 4Gi", granted=("4",), unit="Gi"
    ),
    "--data-parallel-address": MappedFlag("--coordinator", _ONE_ADDRESS),
    "--data-parallel-rpc-port": MappedFlag("--coordinator", _ONE_ADDRESS),
    "--data-parallel-rank": MappedFlag("--data-parallel-start-rank", _HOSTS),
    # -- accepted, without effect ----------------------------------------------------------------------
    "--enable-auto-tool-choice": IgnoredFlag("tool calls are parsed wherever the model's format is known"),
    "--exclude-tools-when-tool-choice-none": IgnoredFlag("tool_choice none always hides the tools"),
    "--enable-prompt-tokens-details": IgnoredFlag("usage always has the cached tokens"),
    "--enable-chunked-prefill": IgnoredFlag("prompts are always computed in chunks"),
    "--enable-server-load-tracking": IgnoredFlag("/metrics always has the load"),
    "--disable-uvicorn-access-log": IgnoredFlag("--access-log none is the default"),
    "--disable-access-log-for-endpoints": IgnoredFlag("probes and scrapes that succeed are not logged"),
    "--uvicorn-log-level": IgnoredFlag("one log holds all; --log-level sets its level"),
    "--max-log-len": IgnoredFlag(_NO_TEXTS),
    "--enable-log-deltas": IgnoredFlag(_NO_TEXTS),
    "--log-error-stack": IgnoredFlag("the log has the traceback of every unexpected error"),
    "--aggregate-engine-logging": IgnoredFlag("one line every --log-interval seconds is about all engines"),
    "--enable-offline-docs": IgnoredFlag("/docs needs nothing of other hosts"),
    "--h11-max-header-count": IgnoredFlag("at most 128 headers are accepted"),
    "--trust-remote-code": IgnoredFlag("Penstock's own engines run no code of a model's"),
    "--fail-on-environ-validation": IgnoredFlag("unknown PENSTOCK_ variables are warned about"),
    "--use-tqdm-on-load": IgnoredFlag("progress is shown on a terminal"),
    "--structured-outputs-config": IgnoredFlag("grammars are always those of llguidance"),
    "--dp-sync-interval": IgnoredFlag("engines in lock-step ask each other for work every 32 steps"),
    "--attention-backend": IgnoredFlag("the torch engine has one"),
    "--distributed-executor-backend": IgnoredFlag("an engine of Penstock's own is one process"),
    "--disable-custom-all-reduce": IgnoredFlag("an engine of Penstock's own uses one device"),
    "--disable-cascade-attn": IgnoredFlag("the torch engine has none"),
    "--optimization-level": IgnoredFlag("Penstock's own engines compile nothing"),
    "--compilation-config": IgnoredFlag("Penstock's own engines compile nothing"),
    "--disable-log-stats": IgnoredFlag("--log-interval 0 ends the log's lines; /metrics is always served"),
    "--mm-processor-cache-type": IgnoredFlag(_ONE_MEDIA_CACHE),
    "--mm-shm-cache-max-object-size-mb": IgnoredFlag(_ONE_MEDIA_CACHE),
    "--mm-tensor-ipc": IgnoredFlag(_ONE_MEDIA_CACHE),
    "--mm-hasher-algorithm": IgnoredFlag("the keys of pictures are BLAKE2b"),
    "--mm-encoder-tp-mode": IgnoredFlag("an engine of Penstock's own uses one device"),
    "--skip-mm-profiling": IgnoredFlag("--encoder-cache-tokens bounds what pictures take"),
    "--interleave-mm-strings": IgnoredFlag("pictures always stand where the messages have them"),
    # -- refused ---------------------------------------------------------------------------------------
    "--grpc": Unsupported("Penstock serves HTTP"),
    "--grpc-port": Unsupported("Penstock serves HTTP"),
    "--enable-log-requests": Unsupported(_NO_TEXTS),
    "--enable-log-outputs": Unsupported(_NO_TEXTS),
    "--chat-template-content-format": Unsupported("the format follows from the chat template"),
    "--trust-request-chat-template": Unsupported("requests cannot bring a chat template"),
    "--trust-request-mm-kwargs": Unsupported("--mm-processor-kwargs are the arguments of all requests"),
    "--response-role": Unsupported("the role of a reply is assistant"),
    "--return-tokens-as-token-ids": Unsupported("requests may set return_tokens_as_token_ids"),
    "--tool-parser-plugin": Unsupported("--tool-call-parser has the formats that are served"),
    "--reasoning-parser-plugin": Unsupported("--reasoning-parser has the formats that are served"),
    "--tool-strict-level": Unsupported("a tool's own strict field and tool_choice decide"),
    "--tool-server": Unsupported("tools run at the client"),
    "--cohere-is-reasoning-model": Unsupported("there is no Cohere API"),
    "--cohere-format": Unsupported("there is no Cohere API"),
    "--anthropic-disabled-thinking-effort": Unsupported("the thinking field of requests decides"),
    "--tokens-only": Unsupported("routes for token ids are served beside all others"),
    "--enable-scale-out": Unsupported(
        "routes for token ids, and to render, are there without it; penstock gateway spreads requests"
    ),
    "--fingerprint-mode": Unsupported("system_fingerprint names Penstock's version"),
    "--fingerprint-value": Unsupported("system_fingerprint names Penstock's version"),
    "--data-parallel-supervisor-port": Unsupported(_BALANCER),
    "--dp-supervisor-probe-interval-s": Unsupported(_BALANCER),
    "--dp-supervisor-probe-timeout-s": Unsupported(_BALANCER),
    "--dp-supervisor-probe-failure-threshold": Unsupported(_BALANCER),
    "--data-parallel-external-lb": Unsupported(_BALANCER),
    "--data-parallel-hybrid-lb": Unsupported(_BALANCER),
    "--data-parallel-multi-port-external-lb": Unsupported(_BALANCER),
    "--ssl-ciphers": Unsupported("TLS 1.2 and 1.3 have Python's ciphers; a proxy may have others"),
    "--middleware": Unsupported(_NO_CODE),
    "--disable-fastapi-docs": Unsupported(_DOCS),
    "--enable-flash-late-interaction": Unsupported(
        "there are no scores by the vectors of tokens; /pooling returns these vectors", with_any_engine=True
    ),
    "--tokenizer-mode": Unsupported("there is one tokenizer, tokenizer.json"),
    "--convert": Unsupported(
        "--runner pooling makes vectors of a model of text; labels are those of a model that has them",
        granted=("auto", "none"),
    ),
    "--pooler-config": Unsupported(_POOLER),
    "--quantization": Unsupported("it has no quantized models"),
    "--kv-cache-dtype": Unsupported("its KV cache has the type of the weights, --dtype"),
    "--tensor-parallel-size": Unsupported("it runs on one device; --data-parallel-size starts several"),
    "--pipeline-parallel-size": Unsupported("it runs on one device; --data-parallel-size starts several"),
    "--speculative-config": Unsupported(_SPECULATIVE),
    "--tokenizer-revision": Unsupported("it has one --revision"),
    "--download-dir": Unsupported("HF_HUB_CACHE is the directory of downloads"),
    "--hf-token": Unsupported("HF_TOKEN gives access to gated models"),
    "--override-generation-config": Unsupported("put a generation_config.json beside the model"),
    "--enable-prompt-embeds": Unsupported("prompts are texts and pictures", with_any_engine=True),
    "--enable-mm-embeds": Unsupported("prompts are texts and pictures"),
    "--media-io-kwargs": Unsupported("it reads the first frame of a picture, and no video or sound"),
}
"""Advice on the flags of the version in ``vllm_names.json``, by name."""

OF_THE_SERVER = frozenset(
    {
        "--aggregate-engine-logging",
        "--data-parallel-external-lb",
        "--data-parallel-hybrid-lb",
        "--data-parallel-multi-port-external-lb",
        "--disable-log-stats",
        "--fail-on-environ-validation",
        "--reasoning-parser-plugin",
    }
)
"""Flags that vLLM's engine takes and does nothing with: behind ``--`` they would have no effect."""

EARLIER: dict[str, tuple[str, Advice]] = {
    "--disable-log-requests": ("0", IgnoredFlag("requests are not logged")),
    "--disable-frontend-multiprocessing": ("0", IgnoredFlag("engines are always processes of their own")),
    "--use-v2-block-manager": ("0", IgnoredFlag("there is one block manager")),
    "--enable-reasoning": ("0", IgnoredFlag("--reasoning-parser is enough")),
    "--disable-async-output-proc": ("0", IgnoredFlag("--async-scheduling is the switch")),
    "--multi-step-stream-outputs": ("0", IgnoredFlag("--stream-interval sets the tokens per event")),
    "--num-scheduler-steps": ("1", IgnoredFlag("every step is scheduled")),
    "--swap-space": ("1", IgnoredFlag("preempted requests are computed again")),
    "--preemption-mode": ("1", IgnoredFlag("preempted requests are computed again")),
    "--guided-decoding-backend": ("1", IgnoredFlag("grammars are always those of llguidance")),
    "--max-seq-len-to-capture": ("1", IgnoredFlag("the torch engine decides what it records as CUDA graphs")),
    "--max-context-len-to-capture": (
        "1",
        IgnoredFlag("the torch engine decides what it records as CUDA graphs"),
    ),
    "--cuda-graph-sizes": ("+", IgnoredFlag("the torch engine decides what it records as CUDA graphs")),
    "--worker-use-ray": ("0", MappedFlag("--data-parallel-backend ray")),
    "--engine-use-ray": ("0", MappedFlag("--data-parallel-backend ray")),
    "--task": ("1", _VECTORS),
    "--rope-scaling": ("1", EngineFlag("--hf-overrides.rope_parameters")),
    "--rope-theta": ("1", EngineFlag("--hf-overrides.rope_parameters.rope_theta")),
    "--tool-call-parser-plugin": ("1", Unsupported("--tool-call-parser has the formats that are served")),
    "--lora-extra-vocab-size": ("1", Unsupported("adapters have no tokens of their own")),
    "--enable-lora-bias": ("0", Unsupported("adapters have no biases")),
    "--long-lora-scaling-factors": ("+", Unsupported("adapters do not change the context length")),
    "--num-lookahead-slots": ("1", Unsupported("the scheduler reserves what drafts need")),
    "--override-pooler-config": ("1", EngineFlag("--pooler-config")),
    "--qlora-adapter-name-or-path": ("1", Unsupported("adapters are those of --lora-modules")),
    "--enable-prompt-adapter": ("0", Unsupported("there are no prompt adapters")),
    "--prompt-adapters": ("+", Unsupported("there are no prompt adapters")),
    "--max-prompt-adapters": ("1", Unsupported("there are no prompt adapters")),
    "--max-prompt-adapter-token": ("1", Unsupported("there are no prompt adapters")),
    "--ngram-prompt-lookup-max": ("1", Unsupported(_SPECULATIVE)),
    "--ngram-prompt-lookup-min": ("1", Unsupported(_SPECULATIVE)),
    "--speculative-max-model-len": ("1", Unsupported(_SPECULATIVE)),
    "--speculative-draft-tensor-parallel-size": ("1", Unsupported(_SPECULATIVE)),
    "--speculative-disable-by-batch-size": ("1", Unsupported(_SPECULATIVE)),
    "--speculative-disable-mqa-scorer": ("0", Unsupported(_SPECULATIVE)),
    "--speculative-model-quantization": ("1", Unsupported(_SPECULATIVE)),
    "--spec-decoding-acceptance-method": ("1", Unsupported(_SPECULATIVE)),
    "--scheduler-delay-factor": ("1", IgnoredFlag(_NO_MORE)),
    "--max-num-partial-prefills": ("1", IgnoredFlag(_NO_MORE)),
    "--max-long-partial-prefills": ("1", IgnoredFlag(_NO_MORE)),
    "--max-paddings": ("1", IgnoredFlag(_NO_MORE)),
    "--tokenizer-pool-size": ("1", IgnoredFlag(_NO_MORE)),
    "--tokenizer-pool-type": ("1", IgnoredFlag(_NO_MORE)),
    "--tokenizer-pool-extra-config": ("1", IgnoredFlag(_NO_MORE)),
    "--disable-logprobs-during-spec-decoding": ("0", IgnoredFlag(_NO_MORE)),
    "--disable-mm-preprocessor-cache": ("0", IgnoredFlag(_NO_MORE)),
    "--calculate-kv-scales": ("0", IgnoredFlag(_NO_MORE)),
    "--quantization-param-path": ("1", IgnoredFlag(_NO_MORE)),
    "--full-cuda-graph": ("0", IgnoredFlag(_NO_MORE)),
    "--num-redundant-experts": ("1", IgnoredFlag(_NO_MORE)),
    "--logits-processor-pattern": ("1", Unsupported(_NO_CODE)),
    "--speculative-model": ("1", Unsupported(_SPECULATIVE)),
    "--num-speculative-tokens": ("1", Unsupported(_SPECULATIVE)),
}
"""Flags of earlier versions that old command lines still have: number of values, and advice."""

LATER: dict[str, tuple[str, Advice | None]] = {
    "--monokernel": ("0", None),
    "--sleep-mode-backend": ("1", None),
    "--watchdog-config": ("1", None),
}
"""Advice on flags of later versions of vLLM; those without advice are the engine's."""
