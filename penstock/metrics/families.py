"""Definitions of all metrics: name, kind, unit, labels, buckets and help text.

``/metrics`` and the check of ``docs/metrics.md`` are derived from this table. Names that begin with
``vllm:`` are vLLM's, with its labels and buckets, so that dashboards and gateways made for vLLM work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.metrics.bounds import E2E_BOUNDS, EVENT_BOUNDS, ITL_BOUNDS, TOKEN_BOUNDS, TTFT_BOUNDS
from penstock.metrics.gc_policy import PAUSE_BOUNDS
from penstock.wire.messages import CACHE_CONFIG_LABELS


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric. ``name``: without the ``_total`` of a counter's samples."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    unit: str
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, inclusive, ascending."""


ITERATION_BOUNDS = tuple(float(bound) for bound in (1, *(1 << power for power in range(3, 15))))
"""Bounds of vLLM's metric."""

_ENGINE = ("model_name", "engine")
_SERVER = ("server",)


def _counter(name: str, unit: str, labels: tuple[str, ...], text: str) -> MetricFamily:
    return MetricFamily(name=name, kind=MetricKind.COUNTER, help=text, labels=labels, unit=unit)


def _gauge(name: str, unit: str, labels: tuple[str, ...], text: str) -> MetricFamily:
    return MetricFamily(name=name, kind=MetricKind.GAUGE, help=text, labels=labels, unit=unit)


def _histogram(
    name: str, unit: str, labels: tuple[str, ...], text: str, *, bounds: tuple[float, ...]
) -> MetricFamily:
    return MetricFamily(
        name=name, kind=MetricKind.HISTOGRAM, help=text, labels=labels, unit=unit, bounds=bounds
    )


# -- engines

RUNNING = _gauge("vllm:num_requests_running", "streams", _ENGINE, "Streams that run in the engine.")
WAITING = _gauge("vllm:num_requests_waiting", "streams", _ENGINE, "Streams that wait for a slot.")
WAITING_BY_REASON = _gauge(
    "vllm:num_requests_waiting_by_reason",
    "streams",
    (*_ENGINE, "reason"),
    "Streams that wait, by reason: capacity (for a slot or blocks), deferred (for their grammar, or a prefix "
    "that another stream computes).",
)
KV_USAGE = _gauge("vllm:kv_cache_usage_perc", "share, 0 to 1", _ENGINE, "Share of the KV cache in use.")
UP = _gauge("penstock:engine_up", "0 or 1", _ENGINE, "1 while the engine takes requests.")
ENGINE_INFO = _gauge(
    "penstock:engine_info",
    "1",
    (*_ENGINE, "host"),
    "Where the engine is: an address, local for the host of the API servers.",
)
DRAINING = _gauge(
    "penstock:engine_draining", "0 or 1", _ENGINE, "1 while the engine gets no new streams by order."
)
WEIGHTS = _gauge(
    "penstock:engine_weights",
    "updates",
    (*_ENGINE, "version"),
    "Number of the latest change of weights that the engine has made; the label is their version.",
)
LORA_REQUESTS = _gauge(
    "vllm:lora_requests_info",
    "seconds",
    ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    "The time, since 1970, with the adapters that streams wait for and run with (names, with commas between "
    "them) and how many can run at once as labels. Only with --enable-lora.",
)
CACHE_CONFIG = _gauge(
    "vllm:cache_config_info",
    "1",
    (*_ENGINE, *CACHE_CONFIG_LABELS),
    "Always 1, with properties of the engine's KV cache as labels: tokens per block, number of blocks and so "
    "on.",
)
SLEEP_STATE = _gauge(
    "vllm:engine_sleep_state",
    "0 or 1",
    (*_ENGINE, "sleep_state"),
    "1 for the state that the engine is in: awake, or asleep at level 1 (weights_offloaded) or 2 "
    "(discard_all).",
)
STEPS = _counter("penstock:engine_steps", "steps", _ENGINE, "Steps of the engine.")
DUMMY_STEPS = _counter(
    "penstock:engine_dummy_steps",
    "steps",
    _ENGINE,
    "Further steps, without work, that engines in lock-step with this one needed.",
)
WAVES = _counter(
    "penstock:engine_waves",
    "waves",
    _ENGINE,
    "Stretches of steps that engines in lock-step made together, between which they sleep.",
)
REFUSED_MESSAGES = _counter(
    "penstock:engine_refused_messages",
    "messages",
    _ENGINE,
    "Messages of API servers that the engine refused as invalid; 0 unless a process is defective.",
)
KEPT_PROMPT_HITS = _counter(
    "penstock:kept_prompt_hits",
    "requests",
    _ENGINE,
    "Requests of which the engine got only what follows an earlier prompt that it keeps.",
)
KEPT_PROMPT_MISSES = _counter(
    "penstock:kept_prompt_misses",
    "requests",
    _ENGINE,
    "Such requests whose earlier prompt was gone, so that they were sent again, whole.",
)
KEPT_PROMPT_BYTES = _gauge(
    "penstock:kept_prompt_bytes", "bytes", _ENGINE, "Size of the prompts that the engine keeps for that."
)
ENCODED_IMAGES = _counter("penstock:encoder_images", "images", _ENGINE, "Images that the engine has encoded.")
ENCODER_CACHE_QUERIES = _counter("penstock:encoder_cache_queries", "images", _ENGINE, "Images of prompts.")
ENCODER_CACHE_HITS = _counter(
    "penstock:encoder_cache_hits",
    "images",
    _ENGINE,
    "Images of prompts that were not encoded for them: the encoder cache or the prefix cache had them.",
)
ENCODER_CACHE_TOKENS = _gauge(
    "penstock:encoder_cache_tokens", "tokens", _ENGINE, "Features of images that the encoder cache holds."
)
PAGES_WANTED = _counter(
    "penstock:media_pages_wanted",
    "images",
    _ENGINE,
    "Images that the host's media cache lacked, for which an API server was asked.",
)
PREFIX_QUERIES = _counter(
    "vllm:prefix_cache_queries", "tokens", _ENGINE, "Prompt tokens looked up in the prefix cache."
)
PREFIX_HITS = _counter("vllm:prefix_cache_hits", "tokens", _ENGINE, "Prompt tokens found there.")
EXTERNAL_QUERIES = _counter(
    "vllm:external_prefix_cache_queries",
    "tokens",
    _ENGINE,
    "Prompt tokens looked up at the KV connector, with --engine vllm.",
)
EXTERNAL_HITS = _counter(
    "vllm:external_prefix_cache_hits", "tokens", _ENGINE, "Prompt tokens that the KV connector supplies."
)
MM_QUERIES = _counter(
    "vllm:mm_cache_queries", "pictures", _ENGINE, "Pictures of requests, with --engine vllm."
)
MM_HITS = _counter(
    "vllm:mm_cache_hits", "pictures", _ENGINE, "Pictures whose values vLLM's engine had: they were not sent."
)
PREEMPTIONS = _counter(
    "vllm:num_preemptions",
    "streams",
    _ENGINE,
    "Streams that had to give their KV blocks back.",
)
SPEC_DRAFTS = _counter(
    "vllm:spec_decode_num_drafts", "drafts", _ENGINE, "Drafts of further tokens, by speculative decoding."
)
SPEC_DRAFT_TOKENS = _counter("vllm:spec_decode_num_draft_tokens", "tokens", _ENGINE, "Tokens in drafts.")
SPEC_ACCEPTED = _counter(
    "vllm:spec_decode_num_accepted_tokens", "tokens", _ENGINE, "Tokens of drafts that the model confirmed."
)
SPEC_ACCEPTED_PER_POSITION = _counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "tokens",
    (*_ENGINE, "position"),
    "The same, by their position in the draft, from 0.",
)
PROMPT_TOKENS = _counter(
    "vllm:prompt_tokens", "tokens", _ENGINE, "Prompt tokens of streams that got their first token."
)
PROMPT_TOKENS_BY_SOURCE = _counter(
    "vllm:prompt_tokens_by_source",
    "tokens",
    (*_ENGINE, "source"),
    "The same by source: local_compute, local_cache_hit (prefix cache) or external_kv_transfer.",
)
PROMPT_TOKENS_CACHED = _counter(
    "vllm:prompt_tokens_cached",
    "tokens",
    _ENGINE,
    "Those that were not computed: from a prefix cache or transfer.",
)
GENERATION_TOKENS = _counter("vllm:generation_tokens", "tokens", _ENGINE, "Tokens generated.")
SUCCESS = _counter(
    "vllm:request_success",
    "streams",
    (*_ENGINE, "finished_reason"),
    "Streams that ended, by reason: stop, length, abort or error.",
)
ITERATION_TOKENS = _histogram(
    "vllm:iteration_tokens_total",
    "tokens",
    _ENGINE,
    "Per step: tokens generated, and computed prompt tokens of streams that got their first token.",
    bounds=ITERATION_BOUNDS,
)
PROMPT_LENGTH = _histogram(
    "vllm:request_prompt_tokens",
    "tokens",
    _ENGINE,
    "Prompt tokens of streams that ended.",
    bounds=TOKEN_BOUNDS,
)
GENERATION_LENGTH = _histogram(
    "vllm:request_generation_tokens", "tokens", _ENGINE, "Tokens of streams that ended.", bounds=TOKEN_BOUNDS
)
MAX_GENERATION_TOKENS = _histogram(
    "vllm:request_max_num_generation_tokens",
    "tokens",
    _ENGINE,
    "Tokens of a request's longest choice, at the engine of the first one.",
    bounds=TOKEN_BOUNDS,
)
PARAMS_N = _histogram(
    "vllm:request_params_n",
    "choices",
    _ENGINE,
    "The field n of requests that ended, at the engine of the first choice.",
    bounds=(1.0, 2.0, 5.0, 10.0, 20.0),
)
PARAMS_MAX_TOKENS = _histogram(
    "vllm:request_params_max_tokens",
    "tokens",
    _ENGINE,
    "The limit max_tokens of streams that ended.",
    bounds=TOKEN_BOUNDS,
)
REQUEST_PREEMPTIONS = _histogram(
    "vllm:request_num_preemptions",
    "times",
    _ENGINE,
    "How often a stream that ended had to give its KV blocks back.",
    bounds=(1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
)
PREFILL_COMPUTED = _histogram(
    "vllm:request_prefill_kv_computed_tokens",
    "tokens",
    _ENGINE,
    "Prompt tokens of streams that ended that no prefix cache or transfer supplied.",
    bounds=TOKEN_BOUNDS,
)
TTFT = _histogram(
    "vllm:time_to_first_token_seconds",
    "seconds",
    _ENGINE,
    "From a stream's arrival at the engine to its first token.",
    bounds=TTFT_BOUNDS,
)
ITL = _histogram(
    "vllm:inter_token_latency_seconds", "seconds", _ENGINE, "Between a stream's tokens.", bounds=ITL_BOUNDS
)
TPOT = _histogram(
    "vllm:request_time_per_output_token_seconds",
    "seconds",
    _ENGINE,
    "A stream's mean time per token after its first one.",
    bounds=ITL_BOUNDS,
)
E2E = _histogram(
    "vllm:e2e_request_latency_seconds",
    "seconds",
    _ENGINE,
    "From a stream's arrival at the engine to its end.",
    bounds=E2E_BOUNDS,
)
QUEUE_TIME = _histogram(
    "vllm:request_queue_time_seconds", "seconds", _ENGINE, "From arrival to a slot.", bounds=E2E_BOUNDS
)
INFERENCE_TIME = _histogram(
    "vllm:request_inference_time_seconds", "seconds", _ENGINE, "From the slot to the end.", bounds=E2E_BOUNDS
)
PREFILL_TIME = _histogram(
    "vllm:request_prefill_time_seconds",
    "seconds",
    _ENGINE,
    "From the slot to the first token.",
    bounds=E2E_BOUNDS,
)
DECODE_TIME = _histogram(
    "vllm:request_decode_time_seconds",
    "seconds",
    _ENGINE,
    "From the first token to the end.",
    bounds=E2E_BOUNDS,
)

# -- API servers

CONNECTIONS = _gauge("penstock:connections", "connections", _SERVER, "Open client connections.")
ACCEPT_PAUSES = _counter(
    "penstock:accept_pauses",
    "pauses",
    _SERVER,
    "Times that no more connections were accepted, as the limit of open files was reached.",
)
STREAMS = _gauge("penstock:streams", "streams", _SERVER, "Streams with a handle, ending ones included.")
ADAPTER_STREAMS = _gauge(
    "penstock:adapter_streams",
    "streams",
    (*_SERVER, "adapter", "state"),
    "Streams that run with a LoRA adapter, by its name and whether their first token has come (running) or "
    "not (waiting).",
)
BYTES_QUEUED = _gauge(
    "penstock:bytes_queued", "bytes", _SERVER, "Bytes that wait for clients that read slowly."
)
REQUESTS = _counter(
    "penstock:requests",
    "requests",
    (*_SERVER, "outcome"),
    "Requests that ended, by outcome: stop, length, abort (the client left, or an administrator ended it), "
    "cut (it did not read), error. Rejected requests (4xx, 503 no_engine) do not count.",
)
API_REQUESTS = _counter(
    "penstock:api_requests",
    "requests",
    (*_SERVER, "api", "outcome"),
    "Requests that ended, by API (completions, chat, responses, messages) and outcome.",
)
REJECTED = _counter(
    "penstock:requests_rejected", "requests", (*_SERVER, "status"), "Requests answered with an error status."
)
REFUSED = _counter(
    "penstock:requests_refused",
    "requests",
    (*_SERVER, "reason"),
    "Requests that found no room or no engine, by code: overloaded, too_many_connections, no_engine, "
    "sleeping or draining.",
)
INTERRUPTED = _counter(
    "penstock:streams_interrupted",
    "streams",
    (*_SERVER, "outcome"),
    "Streams that lost their engine, by what became of them: resumed, expired, given_up or ended.",
)
ENGINE_FAULTS = _counter(
    "penstock:engine_faults",
    "faults",
    (*_SERVER, "engine", "reason"),
    "What an engine sent that cannot be right: unknown_stream (of a stream that it does not run), "
    "out_of_order, invalid_token, too_many_tokens, invalid_logprobs, invalid_kv_transfer_params, "
    "invalid_routed_experts, invalid_vectors or invalid_code (the stream ends), invalid_metrics, unreadable "
    "(the connection is closed).",
)
UNKNOWN_FIELDS = _counter(
    "penstock:unknown_request_fields", "fields", (*_SERVER, "field"), "Request fields ignored as unknown."
)
TURNS = _counter(
    "penstock:turns",
    "requests",
    (*_SERVER, "result"),
    "Requests with a long body, by result: hit (its conversation goes on with a turn that is kept) or miss.",
)
TURN_BYTES = _gauge("penstock:turn_memory_bytes", "bytes", _SERVER, "Memory of kept turns (--turn-memory).")
DELIVERED = _counter("penstock:tokens_delivered", "tokens", _SERVER, "Tokens given to replies.")
DISCARDED = _counter(
    "penstock:tokens_discarded",
    "tokens",
    _SERVER,
    "Tokens that came for requests that no longer wanted them: the client had left, or a stop string was "
    "reached.",
)
FRAMES = _counter("penstock:token_frames", "frames", _SERVER, "Token frames received.")
FRAMES_MERGED = _counter(
    "penstock:token_frames_merged", "frames", _SERVER, "Token frames merged into an earlier one."
)
CLIENT_TTFT = _histogram(
    "penstock:client_time_to_first_token_seconds",
    "seconds",
    _SERVER,
    "From a request's arrival to the write of its first token.",
    bounds=TTFT_BOUNDS,
)
CLIENT_ITL = _histogram(
    "penstock:client_inter_token_latency_seconds",
    "seconds",
    _SERVER,
    "Between the writes of a stream's events.",
    bounds=ITL_BOUNDS,
)
CLIENT_E2E = _histogram(
    "penstock:client_request_latency_seconds",
    "seconds",
    _SERVER,
    "From a request's arrival to the end of its reply.",
    bounds=E2E_BOUNDS,
)
EVENT_TOKENS = _histogram(
    "penstock:stream_event_tokens",
    "tokens",
    _SERVER,
    "Tokens per event of streamed replies, with those behind a stop string: the interval in effect.",
    bounds=EVENT_BOUNDS,
)
LOOP_LAG = _histogram(
    "penstock:event_loop_lag_seconds",
    "seconds",
    _SERVER,
    "How late the event loop ran a timer, 4 times a second.",
    bounds=PAUSE_BOUNDS,
)

# -- the response store

RESPONSES_STORED = _counter(
    "penstock:responses_stored", "responses", _SERVER, "Responses given to the store."
)
RESPONSES_REMOVED = _counter(
    "penstock:responses_removed",
    "responses",
    (*_SERVER, "reason"),
    "Responses removed because the store was full (bytes) or after --response-store-ttl (ttl).",
)
RESPONSE_STORE_FAILURES = _counter(
    "penstock:response_store_failures", "writes", _SERVER, "Writes to the response store that failed."
)
RESPONSE_STORE_COMMIT = _histogram(
    "penstock:response_store_commit_seconds",
    "seconds",
    _SERVER,
    "Time of a transaction of the response store; one holds all writes that wait.",
    bounds=PAUSE_BOUNDS,
)
BACKGROUND_RESPONSES = _gauge(
    "penstock:background_responses", "responses", _SERVER, "Responses that run in the background."
)
RESPONSE_STORE_ENTRIES = _gauge(
    "penstock:response_store_entries",
    "responses",
    _SERVER,
    "Stored responses, as this API server saw last. API servers share one store: not to be added up.",
)
RESPONSE_STORE_BYTES = _gauge(
    "penstock:response_store_bytes",
    "bytes",
    _SERVER,
    "Size of stored responses, as this API server saw last. API servers share one store: not to be added up.",
)

# -- pictures

MEDIA_IMAGES = _counter(
    "penstock:media_images",
    "images",
    (*_SERVER, "outcome"),
    "Images of requests: remembered (the API server had prepared them, or was about to), found (in the media "
    "cache), decoded.",
)
MEDIA_REFUSED = _counter(
    "penstock:media_refused",
    "images",
    (*_SERVER, "reason"),
    "Images that were not prepared: invalid, too_large, forbidden, unreachable, timeout, busy, internal.",
)
MEDIA_SECONDS = _counter(
    "penstock:media_seconds",
    "seconds",
    (*_SERVER, "stage"),
    "Time of media workers by stage: fetch, decode, preprocess.",
)
MEDIA_SOURCE_BYTES = _counter(
    "penstock:media_source_bytes", "bytes", _SERVER, "Size of the files of decoded images."
)
MEDIA_PIXELS = _counter("penstock:media_pixels", "pixels", _SERVER, "Pixels of decoded images.")
MEDIA_WORKERS_LOST = _counter(
    "penstock:media_workers_lost", "workers", _SERVER, "Media workers that ended with an image at hand."
)
MEDIA_CACHE_BYTES = _gauge(
    "penstock:media_cache_bytes",
    "bytes",
    _SERVER,
    "Size of the media cache, as this API server saw last. API servers share one: not to be added up.",
)

# -- every process

RESTARTS = _gauge("penstock:process_restarts", "restarts", ("process",), "Restarts of the process.")
START_TIME = _gauge(
    "penstock:process_start_time_seconds", "seconds", ("process",), "Start of the process, since 1970."
)
GC_PAUSE = _histogram(
    "penstock:gc_pause_seconds",
    "seconds",
    ("process", "generation"),
    "Pauses for garbage collection, by generation: 0 young, 2 full.",
    bounds=PAUSE_BOUNDS,
)
GC_FREED = _counter(
    "penstock:gc_freed_objects", "objects", ("process", "generation"), "Objects freed by garbage collection."
)

SPANS = _counter(
    "penstock:spans",
    "spans",
    ("process", "state"),
    "Spans by what became of them: exported, failed, dropped (too many waited). Only with --otlp-endpoint.",
)
MESSAGES_REFUSED = _counter(
    "penstock:coordinator_messages_refused",
    "messages",
    ("process",),
    "Messages of engines and API servers that the coordinator could not use.",
)

METRIC_FAMILIES: dict[str, MetricFamily] = {
    family.name: family for family in tuple(globals().values()) if isinstance(family, MetricFamily)
}
"""Families by name, in the order of this file."""
