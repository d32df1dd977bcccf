"""Recorded and hand-made streams, and what must be seen in them however they are cut."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.token_usage import ReportedUsage


@dataclass(frozen=True)
class Recording:
    name: str
    raw: bytes
    token_events: int
    usage: ReportedUsage | None
    outcome: Outcome
    stripped: bytes | None = None
    """What remains without its usage event; None: all of it."""
    error: bool = False


def _sse(*data: str, end: str = "\n") -> bytes:
    return "".join(f"data: {each}{end}{end}" for each in data).encode()


ROLE = '{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
HELLO = '{"id":"c","choices":[{"index":0,"delta":{"content":"Hallo, Wörld \\"data: [DONE]\\"\\n\\n"}}]}'
THINK = '{"id":"c","choices":[{"index":0,"delta":{"reasoning":"hm"}}],"usage":null}'
STOP = '{"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
USAGE = '{"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}'
CACHED = USAGE.replace("}}", ',"prompt_tokens_details":{"cached_tokens":4}}}')
TEXT = '{"id":"t","choices":[{"index":0,"text":" a"}]}'
CONTINUOUS = '{"choices":[{"index":0,"text":" b"}],"usage":{"prompt_tokens":7,"completion_tokens":%d}}'
TOOL = '{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}'
ERROR = '{"error":{"message":"engine gone","type":"server_error","code":"engine_error"}}'

ANTHROPIC = (
    b"event: message_start\n"
    b'data: {"type":"message_start","message":{"id":"m","usage":{"input_tokens":9,"output_tokens":1}}}\n\n'
    b"event: ping\n"
    b'data: {"type":"ping"}\n\n'
    b"event: content_block_start\n"
    b'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}\n\n'
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hi"}}\n\n'
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" you"}}\n\n'
    b"event: message_delta\n"
    b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":12}}\n\n'
    b"event: message_stop\n"
    b'data: {"type":"message_stop"}\n\n'
)

RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","usage":null}}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Hi"}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":'
    b'{"input_tokens":5,"output_tokens":2,"input_tokens_details":{"cached_tokens":1}}}}\n\n'
)


def _named(*data: str) -> bytes:
    """Events whose event field repeats their type, as OpenAI and Anthropic send them."""
    named = [(each.partition(TYPE)[2].partition('"')[0], each) for each in data]
    return "".join(f"event: {name}\ndata: {each}\n\n" for name, each in named).encode()


TYPE = '"type":"'
CREATED = '{"type":"response.created","response":{"id":"resp_1","status":"in_progress","usage":null}}'
COMPLETED = (
    '{"type":"response.completed","response":{"id":"resp_1","status":"completed","error":null,"usage":'
    '{"input_tokens":5,"output_tokens":9,"input_tokens_details":{"cached_tokens":1}}}}'
)
RESPONSES_DELTAS = [
    "output_text",
    "refusal",
    "reasoning_text",
    "reasoning_summary_text",
    "function_call_arguments",
    "custom_tool_call_input",
    "mcp_call_arguments",
    "code_interpreter_call_code",
    "audio.transcript",
]
"""What OpenAI's API streams, without its prefix and suffix."""
EVERY_DELTA = _named(
    CREATED,
    '{"type":"response.output_item.added","item":{"type":"message","content":[]}}',
    *(
        f'{{"type":"response.{kind}.delta","sequence_number":{number},"item_id":"i","delta":"Hi","obfuscation":"xyz"}}'
        for number, kind in enumerate(RESPONSES_DELTAS)
    ),
    '{"type":"response.output_text.delta","delta":""}',
    '{"type":"response.output_text.done","text":"Hi"}',
    '{"type":"response.output_item.done","item":{"type":"message","content":[{"type":"output_text","text":"Hi"}]}}',
    COMPLETED,
)
CALLS = _named(
    CREATED,
    '{"type":"response.output_item.added","item":{"type":"function_call","name":"f","arguments":""}}',
    '{"type":"response.function_call_arguments.done","arguments":"{}"}',
    COMPLETED,
)
FAILED = _named(
    CREATED,
    '{"type":"response.failed","response":{"id":"resp_1","status":"failed","usage":null,'
    '"error":{"code":"server_error","message":"out of memory"}}}',
)
CANCELLED = _named(
    CREATED,
    '{"type":"response.output_text.delta","delta":"Hi"}',
    '{"type":"response.cancelled","response":{"id":"resp_1","status":"cancelled","usage":null}}',
)
INCOMPLETE = _named(CREATED, COMPLETED.replace("completed", "incomplete"))
FLAT_ERROR = _named(
    CREATED,
    '{"type":"error","sequence_number":1,"code":"server_error","message":"out of memory","param":null}',
)
CACHED_START = (
    '{"type":"message_start","message":{"id":"m","content":[],"usage":{"input_tokens":9,'
    '"cache_creation_input_tokens":20,"cache_read_input_tokens":100,"output_tokens":1}}}'
)
BLOCKS = _named(
    CACHED_START,
    '{"type":"content_block_start","index":0,"content_block":{"type":"thinking","thinking":"","signature":""}}',
    '{"type":"content_block_delta","index":0,"delta":{"type":"thinking_delta","thinking":"hm"}}',
    '{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":"EqQB"}}',
    '{"type":"content_block_stop","index":0}',
    '{"type":"ping"}',
    '{"type":"content_block_start","index":1,"content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}',
    '{"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":""}}',
    '{"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{\\"a\\":1}"}}',
    '{"type":"content_block_stop","index":1}',
    '{"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"input_tokens":9,"output_tokens":5}}',
    '{"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":12}}',
    '{"type":"message_stop"}',
)
OVERLOADED = _named(
    CACHED_START,
    '{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"},"request_id":"r"}',
)

ALL = [
    Recording(
        "responses: every delta", EVERY_DELTA, len(RESPONSES_DELTAS), ReportedUsage(5, 9, 1), Outcome.OK
    ),
    Recording("responses, then done", EVERY_DELTA + _sse("[DONE]"), 9, ReportedUsage(5, 9, 1), Outcome.OK),
    Recording("responses: a call without arguments", CALLS, 1, ReportedUsage(5, 9, 1), Outcome.OK),
    Recording("responses: failed", FAILED, 0, None, Outcome.MODEL_SERVER_ERROR, error=True),
    Recording("responses: cancelled", CANCELLED, 1, None, Outcome.OK_WITHOUT_USAGE),
    Recording("responses: incomplete", INCOMPLETE, 0, ReportedUsage(5, 9, 1), Outcome.OK),
    Recording("responses: error", FLAT_ERROR, 0, None, Outcome.MODEL_SERVER_ERROR, error=True),
    Recording("responses: truncated", EVERY_DELTA.rpartition(b"event: ")[0], 9, None, Outcome.NETWORK_ERROR),
    Recording("messages: blocks", BLOCKS, 3, ReportedUsage(129, 12, 100), Outcome.OK),
    Recording(
        "messages: overloaded",
        OVERLOADED,
        0,
        ReportedUsage(129, 1, 100),
        Outcome.MODEL_SERVER_ERROR,
        error=True,
    ),
    Recording("chat", _sse(ROLE, HELLO, STOP, "[DONE]"), 1, None, Outcome.OK_WITHOUT_USAGE),
    Recording(
        "chat with usage",
        _sse(ROLE, HELLO, HELLO, STOP, USAGE, "[DONE]"),
        2,
        ReportedUsage(7, 3),
        Outcome.OK,
        stripped=_sse(ROLE, HELLO, HELLO, STOP, "[DONE]"),
    ),
    Recording(
        "CRLF",
        _sse(ROLE, THINK, STOP, CACHED, "[DONE]", end="\r\n"),
        1,
        ReportedUsage(7, 3, 4),
        Outcome.OK,
        stripped=_sse(ROLE, THINK, STOP, "[DONE]", end="\r\n"),
    ),
    Recording(
        "CR",
        _sse(HELLO, USAGE, "[DONE]", end="\r"),
        1,
        ReportedUsage(7, 3),
        Outcome.OK,
        stripped=_sse(HELLO, "[DONE]", end="\r"),
    ),
    Recording(
        "continuous usage",
        _sse(CONTINUOUS % 1, CONTINUOUS % 2, "[DONE]"),
        2,
        ReportedUsage(7, 2),
        Outcome.OK,
    ),
    Recording(
        "no space, comments, byte order mark, ids, several data lines",
        b"\xef\xbb\xbf: hello\n\ndata:" + TEXT.encode() + b"\n\n:keep-alive\n\nid: 4\nretry: 100\n"
        b'data: {"choices":\ndata: [{"text":"x"}]}\n\n\n\ndata:[DONE]\n\n',
        2,
        None,
        Outcome.OK_WITHOUT_USAGE,
    ),
    Recording(
        "tools",
        _sse(ROLE, TOOL, STOP, USAGE, "[DONE]"),
        1,
        ReportedUsage(7, 3),
        Outcome.OK,
        _sse(ROLE, TOOL, STOP, "[DONE]"),
    ),
    Recording("messages", ANTHROPIC, 2, ReportedUsage(9, 12), Outcome.OK),
    Recording("responses", RESPONSES, 1, ReportedUsage(5, 2, 1), Outcome.OK),
    Recording("error event", _sse(TEXT, ERROR), 1, None, Outcome.MODEL_SERVER_ERROR, error=True),
    Recording(
        "error event, then done", _sse(TEXT, ERROR, "[DONE]"), 1, None, Outcome.MODEL_SERVER_ERROR, error=True
    ),
    Recording(
        "something after the end",
        _sse(TEXT, USAGE, "[DONE]") + _sse(TEXT, USAGE.replace("3", "9"), ERROR, "{"),
        1,
        ReportedUsage(7, 3),
        Outcome.OK,
        stripped=_sse(TEXT, "[DONE]") + _sse(TEXT, ERROR, "{"),
    ),
    Recording("truncated", _sse(ROLE, HELLO), 1, None, Outcome.NETWORK_ERROR),
    Recording(
        "truncated within an event", _sse(TEXT) + b'data: {"choices":[{"te', 1, None, Outcome.NETWORK_ERROR
    ),
    Recording("last empty line missing", _sse(TEXT) + b"data: [DONE]", 1, None, Outcome.OK_WITHOUT_USAGE),
    Recording(
        "malformed", _sse(TEXT, '{"choices":[{"text":"x"}', TEXT, "[DONE]"), 2, None, Outcome.CONTENT_ERROR
    ),
    Recording("another protocol", _sse('{"hello":"world"}', "[DONE]"), 0, None, Outcome.OK_WITHOUT_USAGE),
    Recording(
        "wrong charset",
        'data: {"choices":[{"text":"ü"}]}\n\n'.encode("latin-1"),
        0,
        None,
        Outcome.CONTENT_ERROR,
    ),
    Recording(
        "wrong charset where nobody looks",
        'data: {"who":"ü","choices":[{"text":"x"}]}\n\ndata: [DONE]\n\n'.encode("latin-1"),
        0,
        None,
        Outcome.CONTENT_ERROR,
    ),
]
