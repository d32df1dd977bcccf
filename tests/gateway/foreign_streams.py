"""Streams as other servers send them, each with its server's habits; written for these tests.

Nothing in them is wrong: a gateway relays them byte for byte, and counts what there is to count.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.requests.request_body import GENERATION_PATHS
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.token_usage import ReportedUsage

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = "[DONE]"


@dataclass(frozen=True)
class ForeignStream:
    name: str
    path: str
    raw: bytes
    tokens: int
    """Events with generated content."""
    usage: ReportedUsage | None = None

    @property
    def generates(self) -> bool:
        return self.path in GENERATION_PATHS

    @property
    def outcome(self) -> Outcome:
        return Outcome.OK_WITHOUT_USAGE if self.generates and self.usage is None else Outcome.OK


def events(*data: str, before: str = "data: ", end: str = "\n") -> bytes:
    return "".join(f"{before}{each}{end}{end}" for each in data).encode()


def named(*data: str) -> bytes:
    """Events whose event field repeats their type."""
    return b"".join(
        b"event: %b\n" % each.partition('"type":"')[2].partition('"')[0].encode() + events(each)
        for each in data
    )


VLLM = '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[%s]%s}'
VLLM_CHOICE = '{"index":0,"delta":{%s},"logprobs":null,"finish_reason":%s,"token_ids":null}'
SGLANG = (
    '{"id":"9a","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":{%s},'
    '"logprobs":null,"finish_reason":%s,"matched_stop":%s}],"usage":null}'
)
TGI = (
    '{"object":"chat.completion.chunk","id":"","created":7,"model":"m","system_fingerprint":"3.3-native",'
    '"choices":[{"index":0,"delta":{"role":"assistant","content":"%s"},"logprobs":null,"finish_reason":%s}],'
    '"usage":null}'
)
LLAMA = (
    '{"choices":[%s],"created":7,"id":"chatcmpl-L","model":"m","system_fingerprint":"b6600",'
    '"object":"chat.completion.chunk"%s}'
)
LLAMA_TIMINGS = ',"timings":{"cache_n":0,"prompt_n":9,"prompt_ms":31.5,"predicted_per_second":52.25}'
OLLAMA = (
    '{"id":"chatcmpl-693","object":"chat.completion.chunk","created":7,"model":"m",'
    '"system_fingerprint":"fp_ollama","choices":[%s]%s}'
)
AZURE = '{"choices":[%s],"created":%d,"id":"%s","model":"%s","object":"%s"%s}'
SAFE = '{"hate":{"filtered":false,"severity":"safe"}}'
TENSORRT = (
    '{"id":"chatcmpl-t","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,'
    '"delta":{"role":"assistant","content":"%s","reasoning_content":null,"tool_calls":[]},"logprobs":'
    '{"content":[{"token":"%s","logprob":%s,"bytes":null,"top_logprobs":[]}]},"finish_reason":%s,'
    '"stop_reason":null,"disaggregated_params":null}],"usage":null}'
)
LITELLM = (
    '{"id":"chatcmpl-l","created":7,"model":"m","object":"chat.completion.chunk","choices":[{"index":0,'
    '"delta":{%s}%s}]%s}'
)
MISTRAL = (
    '{"id":"x1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"delta":'
    '{"content":%s},"finish_reason":%s}]%s,"p":"abcdef"}'
)
DEEPSEEK = (
    '{"id":"d","object":"chat.completion.chunk","created":7,"model":"m","system_fingerprint":"fp",'
    '"choices":[{"index":0,"delta":{"content":%s,"reasoning_content":%s},"logprobs":null,'
    '"finish_reason":%s}]%s}'
)
GEMINI = (
    '{"choices":[{"delta":{"content":"%s","role":"assistant"}%s,"index":0}],"created":7,"id":"g",'
    '"model":"models/m","object":"chat.completion.chunk","usage":{"completion_tokens":%d,'
    '"prompt_tokens":4,"total_tokens":9}}'
)
PERPLEXITY = (
    '{"id":"p","type":"message","object":"chat.completion.chunk","created":7,"model":"m","usage":'
    '{"prompt_tokens":4,"completion_tokens":%d,"cost":{"total_cost":0.006}},"choices":[{"index":0,'
    '"finish_reason":%s,"message":{"role":"assistant","content":"%s"},"delta":{"role":"assistant",'
    '"content":"%s"}}]}'
)
RESPONSES = '{"type":"response.%s","sequence_number":%d,"obfuscation":"aZ3"%s}'

STREAMS = [
    ForeignStream(
        "vLLM",
        CHAT,
        events(
            VLLM % (VLLM_CHOICE % ('"role":"assistant","content":""', "null"), ',"prompt_token_ids":null'),
            VLLM % (VLLM_CHOICE % ('"reasoning":"hm"', "null"), ""),
            VLLM % (VLLM_CHOICE % ('"content":" a"', "null"), ""),
            VLLM % (VLLM_CHOICE % ('"content":" b"', "null"), ""),
            VLLM % (VLLM_CHOICE % ('"content":""', '"stop","stop_reason":null'), ""),
            VLLM
            % (
                "",
                ',"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,'
                '"prompt_tokens_details":{"cached_tokens":4}}',
            ),
            DONE,
        ),
        3,
        ReportedUsage(9, 3, 4),
    ),
    ForeignStream(
        "vLLM completions with usage in every event",
        COMPLETIONS,
        events(
            *(
                '{"id":"cmpl-1","object":"text_completion","created":7,"model":"m","choices":[{"index":0,'
                f'"text":" a","logprobs":null,"finish_reason":{finish},"stop_reason":null}}],'
                f'"usage":{{"prompt_tokens":4,"total_tokens":{4 + count},"completion_tokens":{count}}}}}'
                for count, finish in ((1, "null"), (2, '"length"'))
            ),
            DONE,
        ),
        2,
        ReportedUsage(4, 2),
    ),
    ForeignStream(
        "SGLang",
        CHAT,
        events(
            SGLANG
            % ('"role":"assistant","content":"","reasoning_content":null,"tool_calls":null', "null", "null"),
            SGLANG
            % ('"role":null,"content":null,"reasoning_content":"hm","tool_calls":null', "null", "null"),
            SGLANG
            % (
                '"role":null,"content":null,"tool_calls":[{"id":"call_1","index":0,"type":"function",'
                '"function":{"name":"f","arguments":"{}"}}]',
                "null",
                "null",
            ),
            SGLANG % ('"role":null,"content":null', '"stop"', "151645"),
            '{"id":"9a","object":"chat.completion.chunk","created":7,"model":"m","choices":[],"usage":'
            '{"prompt_tokens":8,"total_tokens":10,"completion_tokens":2,"prompt_tokens_details":null,'
            '"reasoning_tokens":0}}',
            DONE,
        ),
        2,
        ReportedUsage(8, 2),
    ),
    ForeignStream(
        "TGI, without a space, with keep-alives",
        CHAT,
        b":\n\n"
        + events(
            TGI % ("Hi", "null"),
            TGI % (" you", "null"),
            TGI % ("", '"eos_token"'),
            '{"object":"chat.completion.chunk","id":"","created":7,"model":"m","choices":[],"usage":'
            '{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}',
            DONE,
            before="data:",
        ),
        2,
        ReportedUsage(5, 3),
    ),
    ForeignStream(
        "TGI's own API, which has no terminator",
        "/generate_stream",
        events(
            '{"index":1,"token":{"id":7,"text":" a","logprob":-0.5,"special":false},"generated_text":null,'
            '"details":null}',
            '{"index":2,"token":{"id":2,"text":"</s>","logprob":null,"special":true},"generated_text":" a",'
            '"details":{"finish_reason":"eos_token","generated_tokens":2,"seed":null}}',
            before="data:",
        ),
        0,
    ),
    ForeignStream(
        "llama.cpp",
        CHAT,
        events(
            LLAMA
            % (
                '{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}',
                ',"prompt_progress":{"total":9,"cache":0,"processed":9,"time_ms":31}',
            ),
            LLAMA % ('{"finish_reason":null,"index":0,"delta":{"content":"Hi"}}', LLAMA_TIMINGS),
            LLAMA % ('{"finish_reason":"stop","index":0,"delta":{}}', ""),
            LLAMA
            % (
                "",
                ',"usage":{"completion_tokens":2,"prompt_tokens":9,"total_tokens":11}' + LLAMA_TIMINGS,
            ),
            DONE,
        ),
        1,
        ReportedUsage(9, 2),
    ),
    ForeignStream(
        "llama.cpp's own API, which has no terminator",
        "/completion",
        events(
            '{"index":0,"content":"Hi","tokens":[7],"stop":false,"id_slot":-1,"tokens_predicted":1}',
            '{"index":0,"content":"","tokens":[],"id_slot":0,"stop":true,"stop_type":"eos","truncated":false,'
            '"timings":{"prompt_n":4,"predicted_per_second":1e+20}}',
        ),
        0,
    ),
    ForeignStream(
        "llama-cpp-python, CRLF and pings",
        CHAT,
        b": ping - 2026-05-01 12:00:00.000000\r\n\r\n"
        + events(
            '{"id":"c","model":"m","created":7,"object":"chat.completion.chunk","choices":[{"index":0,'
            '"delta":{"role":"assistant"},"logprobs":null,"finish_reason":null}]}',
            '{"id":"c","model":"m","created":7,"object":"chat.completion.chunk","choices":[{"index":0,'
            '"delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}]}',
            '{"id":"c","model":"m","created":7,"object":"chat.completion.chunk","choices":[{"index":0,'
            '"delta":{},"logprobs":null,"finish_reason":"length"}]}',
            DONE,
            end="\r\n",
        ),
        1,
    ),
    ForeignStream(
        "Ollama",
        CHAT,
        events(
            OLLAMA % ('{"index":0,"delta":{"role":"assistant","content":"Hi"},"finish_reason":""}', ""),
            OLLAMA % ('{"index":0,"delta":{"role":"assistant","content":" you"},"finish_reason":null}', ""),
            OLLAMA % ('{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":"stop"}', ""),
            OLLAMA % ("", ',"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}'),
            DONE,
        ),
        2,
        ReportedUsage(5, 3),
    ),
    ForeignStream(
        "Azure with its filters",
        CHAT,
        events(
            AZURE
            % (
                "",
                0,
                "",
                "",
                "",
                ',"prompt_filter_results":[{"prompt_index":0,"content_filter_results":' + SAFE + "}]",
            ),
            AZURE
            % (
                '{"content_filter_results":{},"delta":{"content":"Hi","role":"assistant","refusal":null},'
                '"finish_reason":null,"index":0,"logprobs":null}',
                7,
                "c",
                "m",
                "chat.completion.chunk",
                ',"usage":null,"obfuscation":"x"',
            ),
            AZURE
            % (
                '{"index":0,"finish_reason":null,"content_filter_results":'
                + SAFE
                + ',"content_filter_offsets":'
                '{"check_offset":44,"start_offset":44,"end_offset":198}}',
                0,
                "",
                "",
                "",
                "",
            ),
            AZURE
            % (
                '{"content_filter_results":{},"delta":{},"finish_reason":"stop","index":0,"logprobs":null}',
                7,
                "c",
                "m",
                "chat.completion.chunk",
                "",
            ),
            '{"id":"","object":"","created":0,"model":"","prompt_annotations":[{"prompt_index":0}]}',
            AZURE
            % (
                "",
                7,
                "c",
                "m",
                "chat.completion.chunk",
                ',"usage":{"completion_tokens":1,"completion_tokens_details":{"reasoning_tokens":0},'
                '"prompt_tokens":6,"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":0},'
                '"total_tokens":7}',
            ),
            DONE,
        ),
        1,
        ReportedUsage(6, 1, 0, 0),
    ),
    ForeignStream(
        "Anthropic",
        "/v1/messages",
        named(
            '{"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","model":"m",'
            '"content":[],"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":9,'
            '"cache_creation_input_tokens":0,"cache_read_input_tokens":20,"cache_creation":'
            '{"ephemeral_5m_input_tokens":0},"output_tokens":1,"service_tier":"standard"}}}',
            '{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"",'
            '"signature":""}}',
            '{"type":"ping"}',
            '{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}',
            '{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"Eq"}}',
            '{"type":"content_block_stop","index":0}',
            '{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}',
            '{"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Hi"}}',
            '{"type":"content_block_stop","index":1}',
            '{"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":'
            '{"output_tokens":12,"server_tool_use":null}}',
            '{"type":"message_stop"}',
        ),
        2,
        ReportedUsage(29, 12, 20),
    ),
    ForeignStream(
        "messages of an OpenAI server, with the terminator of chat",
        "/v1/messages",
        named(
            '{"type":"message_start","message":{"id":"m","usage":{"input_tokens":9,"output_tokens":0}}}',
            '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}',
            '{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":9,'
            '"output_tokens":1}}',
        )
        + events(DONE),
        1,
        ReportedUsage(9, 1),
    ),
    ForeignStream(
        "TensorRT-LLM, NaN for a logprob",
        CHAT,
        events(
            TENSORRT % ("Hi", "Hi", "NaN", "null"),
            TENSORRT % (" you", " you", "-Infinity", "null"),
            TENSORRT % ("", "", "-0.25", '"stop"'),
            '{"id":"chatcmpl-t","object":"chat.completion.chunk","created":7,"model":"m","choices":[],"usage":'
            '{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}',
            DONE,
        ),
        2,
        ReportedUsage(3, 2),
    ),
    ForeignStream(
        "LiteLLM",
        CHAT,
        events(
            LITELLM % ('"content":"Hi","role":"assistant"', "", ""),
            LITELLM % ('"provider_specific_fields":null,"content":" you"', "", ',"citations":null'),
            LITELLM % ("", ',"finish_reason":"stop"', ""),
            LITELLM
            % (
                "",
                "",
                ',"usage":{"completion_tokens":2,"prompt_tokens":8,"total_tokens":10,'
                '"completion_tokens_details":null,"prompt_tokens_details":{"cached_tokens":null}}',
            ),
            DONE,
        ),
        2,
        ReportedUsage(8, 2),
    ),
    ForeignStream(
        "Mistral, content in parts",
        CHAT,
        events(
            MISTRAL % ('""', "null", ""),
            MISTRAL
            % ('[{"type":"thinking","thinking":[{"type":"text","text":"hm"}],"closed":true}]', "null", ""),
            MISTRAL % ('[{"type":"text","text":"Hi"}]', "null", ""),
            MISTRAL % ('[{"type":"reference","reference_ids":[0]}]', "null", ""),
            MISTRAL
            % ('""', '"stop"', ',"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}'),
            DONE,
        ),
        3,
        ReportedUsage(7, 3),
    ),
    ForeignStream(
        "DeepSeek with keep-alives",
        CHAT,
        b": keep-alive\n\n: keep-alive\n\n"
        + events(
            DEEPSEEK % ("null", '""', "null", ""),
            DEEPSEEK % ("null", '"hm"', "null", ""),
            DEEPSEEK % ('"Hi"', "null", "null", ""),
            DEEPSEEK
            % (
                '""',
                "null",
                '"stop"',
                ',"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,"prompt_tokens_details":'
                '{"cached_tokens":0},"prompt_cache_hit_tokens":0,"prompt_cache_miss_tokens":7}',
            ),
            DONE,
        ),
        2,
        ReportedUsage(7, 2, 0),
    ),
    ForeignStream(
        "Gemini",
        CHAT,
        events(GEMINI % ("Hi", "", 1), GEMINI % (" you", ',"finish_reason":"stop"', 5), DONE),
        2,
        ReportedUsage(4, 5),
    ),
    ForeignStream(
        "Perplexity, typed, CRLF, without a terminator",
        CHAT,
        events(
            PERPLEXITY % (1, "null", "Hi", "Hi"), PERPLEXITY % (2, '"stop"', "Hi you", " you"), end="\r\n"
        ),
        2,
        ReportedUsage(4, 2),
    ),
    ForeignStream(
        "OpenRouter",
        CHAT,
        b": OPENROUTER PROCESSING\n\n"
        + events(
            '{"id":"gen-1","provider":"P","model":"m","object":"chat.completion.chunk","created":7,"choices":'
            '[{"index":0,"delta":{"role":"assistant","content":"","reasoning":null,"reasoning_details":[]},'
            '"finish_reason":null,"native_finish_reason":null,"logprobs":null}]}',
            '{"id":"gen-1","provider":"P","model":"m","object":"chat.completion.chunk","created":7,"choices":'
            '[{"index":0,"delta":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}]}',
            '{"id":"gen-1","provider":"P","model":"m","object":"chat.completion.chunk","created":7,"choices":'
            '[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":'
            '{"prompt_tokens":4,"completion_tokens":1,"cost":0.00014,"is_byok":false}}',
            DONE,
        ),
        1,
        ReportedUsage(4, 1),
    ),
    ForeignStream(
        "OpenAI's audio",
        CHAT,
        events(
            '{"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant",'
            '"content":null,"audio":{"id":"audio_1","transcript":"Hi"}},"finish_reason":null}],"usage":null}',
            '{"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":null,'
            '"audio":{"data":"AAAA"}},"finish_reason":null}],"usage":null}',
            '{"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},'
            '"finish_reason":"stop"}],"usage":null}',
            DONE,
        ),
        2,
    ),
    ForeignStream(
        "OpenAI's responses",
        "/v1/responses",
        named(
            RESPONSES % ("created", 0, ',"response":{"id":"resp_1","status":"in_progress","error":null}'),
            RESPONSES % ("output_item.added", 1, ',"item":{"id":"msg_1","type":"message","content":[]}'),
            RESPONSES % ("output_text.delta", 2, ',"item_id":"msg_1","delta":"Hi","logprobs":[]'),
            RESPONSES % ("output_text.done", 3, ',"item_id":"msg_1","text":"Hi"'),
            RESPONSES
            % (
                "completed",
                4,
                ',"response":{"id":"resp_1","status":"completed","error":null,"usage":{"input_tokens":5,'
                '"input_tokens_details":{"cached_tokens":0},"output_tokens":1,"total_tokens":6}}',
            ),
        ),
        1,
        ReportedUsage(5, 1, 0),
    ),
    ForeignStream(
        "transcripts",
        "/v1/audio/transcriptions",
        named(
            '{"type":"transcript.text.delta","delta":"Hi"}',
            '{"type":"transcript.text.done","text":"Hi","usage":{"type":"tokens","input_tokens":14}}',
        ),
        0,
        ReportedUsage(14),
    ),
    ForeignStream("an API that nobody knows", "/v1/audio/speech", b"data: AAAA\n\ndata: {\n\n", 0),
    ForeignStream(
        "a byte order mark, empty data, heartbeats, null and foreign fields",
        CHAT,
        b"\xef\xbb\xbfretry: 3000\n\ndata:\n\ndata: \n\ndata\n\nid: 4\ndata: {}\n\n"
        + events(
            '{"type":null,"choices":null}',
            '{"choices":null,"usage":null,"error":null}',
            '{"choices":[null]}',
            '{"choices":[{"delta":null,"finish_reason":null}],"error":{}}',
            '{"choices":[{"delta":"text"}],"usage":[],"error":""}',
            '{"choices":{},"object":7,"id":null}',
            "null",
            "[]",
            '"ping"',
            "0.5",
            '{"choices":[{"delta":{"content":"\\ud83d"}}]}',
            '{"choices":[{"delta":{"content":"\\ude00"},"finish_reason":"stop"}],"type":{},'
            '"usage":{"prompt_tokens":4.0,"completion_tokens":2.0,"prompt_tokens_details":[]}}',
            '{"choices":[],"usage":{"prompt_tokens":"many","completion_tokens":1e300,"queue_time":NaN}}',
            "[DONE] ",
        ),
        2,
        ReportedUsage(4, 2),
    ),
    ForeignStream(
        "chunks that are named",
        COMPLETIONS,
        b'event: message\ndata: {"choices":[{"text":"a"}]}\n\n'
        b'event: completion\ndata: {"choices":[{"text":"b","finish_reason":"stop"}]}\n\n'
        b'event: usage\ndata: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
        b"event: done\ndata: [DONE]\n\n",
        2,
        ReportedUsage(1, 2),
    ),
]
