"""Events and bodies that OpenAI's completions and chat completions have in common.

Bytes that all events of a request share are prepared once. Field order and spelling follow vLLM's. A whole
reply has every field of vLLM's, null where it is empty; events omit fields that are null in vLLM and absent
in OpenAI's own API (docs/compatibility.md).
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from penstock import __version__
from penstock.generation.dialect import EventContent, ReplyFormat
from penstock.generation.parsers.delta import Delta, TextKind
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.logprobs import TokenLogprobs
from penstock.generation.replies.reply import Choice, Prompt, prompt_token_ids
from penstock.generation.replies.routed_experts import encoded
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import encode_json
from penstock.streaming.rows.token_fields import ItemKind, TokenFields
from penstock.streaming.stream import StreamError
from penstock.streaming.token_names import TokenNames
from penstock.streaming.token_table import escape_json

DONE = b"data: [DONE]\n\n"
REASONING_START = b',"delta":{"reasoning":"'
"""JSON between a choice's index and its reasoning; it is closed as content is."""
SYSTEM_FINGERPRINT = f"penstock-{__version__}"
SERVICE_TIER = b'"default"'
"""The tier that serves all requests, whichever they ask for; ``priority`` is a field of its own."""
NULLABLE = frozenset(("content", "refusal", "logprobs"))
"""Fields that OpenAI's schemas require and that may be null."""
_FINGERPRINT = b',"system_fingerprint":' + encode_json(SYSTEM_FINGERPRINT)


class OpenAIReply(ReplyFormat):
    """The reply to one request; a subclass per API formats choices."""

    __slots__ = ("_prefix", "_service_tier", "created", "id", "model", "role", "strict")

    event_object: ClassVar[str]
    body_object: ClassVar[str]
    text_start: ClassVar[bytes]
    """JSON between a choice's index and its text."""
    text_end: ClassVar[bytes]
    """JSON that closes what ``text_start`` opens."""

    logprob_lists: ClassVar[Sequence[tuple[bytes, ItemKind]]]
    """The lists of the field ``logprobs`` of an event, and the JSON that precedes each."""

    def __init__(
        self, id: str, model: str, role: str, *, show_tier: bool = False, strict: bool = False
    ) -> None:
        """``show_tier``: name the service tier, as OpenAI does if the request has one. ``strict``: leave null
        fields out of whole replies as well, but for those that OpenAI's schemas require."""
        self.strict = strict
        self.id = id
        self.model = model
        self.role = role
        self.created = int(time.time())
        self._service_tier = SERVICE_TIER if show_tier else b"null"
        after_id = _event_fields(self.event_object, self.created, model, show_tier)
        self._prefix = b'data: {"id":"%b%b' % (escape_json(id), after_id)

    # -- events

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        start = self.text_start if kind is TextKind.CONTENT else REASONING_START
        return b'%b{"index":%d%b' % (self._prefix, index, start)

    def text_open(self, index: int, kind: TextKind) -> bool:
        return True

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return self.text_end + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def token_fields(self, names: TokenNames, width: int, *, ids: bool) -> TokenFields | None:
        return _token_fields(self.text_end, tuple(self.logprob_lists), names, width, ids)

    @abstractmethod
    def content(self, index: int, text: bytes, delta: Delta | None) -> bytes:
        """The start of an event, up to the text or delta of choice ``index``."""

    @abstractmethod
    def logprobs(self, logprobs: TokenLogprobs) -> Iterator[bytes]:
        """The field ``logprobs`` of a choice, in pieces."""

    def event(self, index: int, content: EventContent) -> bytes:
        finish_reason = content.finish_reason
        parts = [self.content(index, content.text, content.delta), b',"logprobs":']
        if content.logprobs is None:
            parts.append(content.spelled_logprobs or b"null")
        else:
            parts += self.logprobs(content.logprobs)
        if finish_reason is None:
            parts.append(b',"finish_reason":null')
        else:
            parts.append(
                b',"finish_reason":"%b","stop_reason":%b' % (finish_reason, encode_json(content.stop_reason))
            )
        if content.prompt_token_ids is not None:
            parts += (b',"prompt_token_ids":', encode_json(content.prompt_token_ids))
        if content.token_ids is not None:
            parts += (b',"token_ids":', encode_json(content.token_ids))
        if content.weight_versions is not None:
            parts += (b',"weight_versions":', encode_json(content.weight_versions))
        parts.append(b"}]" if finish_reason is None else b"}]" + _FINGERPRINT)
        if content.usage is not None:
            parts += (b',"usage":', encode_json(usage_field(content.usage)))
        if content.kv_transfer_params is not None:
            parts += (b',"kv_transfer_params":', content.kv_transfer_params)
        parts.append(b"}\n\n")
        return b"".join(parts)

    def end(self, usage: TokenUsage | None) -> bytes:
        if usage is None:
            return DONE
        counts, metrics = encode_json(usage_field(usage)), usage.metrics()
        told = b"" if metrics is None else b',"metrics":' + encode_json(metrics)
        return b'%b],"usage":%b%b%b}\n\n' % (self._prefix, counts, _FINGERPRINT, told) + DONE

    def error(self, error: StreamError) -> bytes:
        """Its message ends with the status that an HTTP reply would have had: agents look for that number to
        decide whether to try again, and drop fields of the event that they do not know."""
        failure = stream_failed(error)
        message = f"{failure.message} (status {failure.status})"
        return b"data: %b\n\n" % encode_json({"error": failure.fields() | {"message": message}})

    # -- replies that are not streamed

    whole_nulls: ClassVar[Sequence[tuple[bytes, bytes]]] = ()
    """Fields of vLLM's whole replies that are always null here, after those of the prompt."""

    def kept(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that an object of a whole reply has."""
        if not self.strict:
            return fields
        return {name: value for name, value in fields.items() if value is not None or name in NULLABLE}

    def _kept(self, name: bytes, value: bytes) -> bytes:
        return b"" if self.strict and value == b"null" else b',"%b":%b' % (name, value)

    @abstractmethod
    def choice_content(self, choice: Choice) -> dict[str, Any]:
        """The text or message of a choice of a finished reply."""

    def prompt_fields(self, prompt: Prompt, *, return_ids: bool) -> Iterator[bytes]:
        """Fields of a prompt in pieces, each field after a comma. ``return_ids``: with token ids."""
        if prompt.logprobs is None:
            yield self._kept(b"prompt_logprobs", b"null")
        else:
            yield b',"prompt_logprobs":'
            yield from prompt.logprobs.field()
        ids = prompt_token_ids(prompt) if return_ids else None
        yield self._kept(b"prompt_token_ids", encode_json(ids))

    prompt_in_choice: ClassVar[bool]
    """Whether each choice has the fields of its prompt, otherwise the body has them."""

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        return_ids = reply.plan.return_token_ids
        start = {"id": self.id, "object": self.body_object, "created": self.created, "model": self.model}
        yield encode_json(start)[:-1] + b',"choices":['
        for index, choice in enumerate(reply.best_choices()):
            yield from self._whole_choice(index, choice, return_ids=return_ids)
        counted = reply.usage()
        usage = encode_json(usage_field(counted) if self.strict else whole_usage_field(counted))
        tier = self._kept(b"service_tier", self._service_tier)
        yield b']%b%b,"usage":%b' % (tier, _FINGERPRINT, usage)
        first = reply.choices[0]
        if not self.prompt_in_choice:
            yield from self.prompt_fields(first.prompt, return_ids=return_ids)
        transfer = b"null" if first.kv_transfer_params is None else first.kv_transfer_params
        values = (
            *self.whole_nulls,
            (b"kv_transfer_params", transfer),
            (b"ec_transfer_params", b"null"),
            (b"metrics", encode_json(counted.metrics())),
        )
        yield b"".join([*(self._kept(name, value) for name, value in values), b"}"])

    def _whole_choice(self, index: int, choice: Choice, *, return_ids: bool) -> Iterator[bytes]:
        content = self.choice_content(choice)  # first: it may change the finish reason
        comma = b"," if index else b""
        yield b'%b{"index":%d,%b,"logprobs":' % (comma, index, encode_json(content)[1:-1])
        logprobs = None if choice.logprobs is None else choice.logprobs.take()
        if logprobs is None:
            yield b"null"
        else:
            yield from self.logprobs(logprobs)
        ending: dict[str, Any] = {
            "finish_reason": choice.finish_reason.decode(),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.tokens if return_ids else None,
        }
        if choice.weight_versions is not None:
            ending["weight_versions"] = choice.weight_versions
        yield b"," + encode_json(self.kept(ending))[1:-1]
        if self.prompt_in_choice:
            yield from self.prompt_fields(choice.prompt, return_ids=return_ids)
        if choice.routed_experts is None:
            yield self._kept(b"routed_experts", b"null") + b"}"
            return
        yield b',"routed_experts":'
        yield from encoded(choice.routed_experts)
        yield b"}"


@lru_cache(maxsize=256)
def _token_fields(
    text_end: bytes,
    logprob_lists: Sequence[tuple[bytes, ItemKind]],
    names: TokenNames,
    width: int,
    ids: bool,
) -> TokenFields:
    """The fields of an API's events: one object for all requests that want the same."""
    lists: list[tuple[bytes, ItemKind]] = []
    logprobs = None
    if width:
        (first, kind), *others = logprob_lists
        lists = [(b"{" + first, kind), *others]
        logprobs = TokenFields.make(lists, b"]}", names, width, texts=False)
        lists[0] = (b'%b,"logprobs":{%b' % (text_end, first), kind)
        end = b']},"finish_reason":null'
    else:
        end = b'%b,"logprobs":null,"finish_reason":null' % text_end
    if ids:
        lists.append((end + b',"token_ids":[', ItemKind.ID))
        end = b"]"
    return TokenFields.make(lists, end + b"}]}\n\n", names, width)._replace(logprobs=logprobs)


@lru_cache(maxsize=64)
def _event_fields(object: str, created: int, model: str, show_tier: bool) -> bytes:
    """What follows the id in the events of all requests of one second."""
    return b'","object":"%b","created":%d,"model":"%b"%b,"choices":[' % (
        object.encode(),
        created,
        escape_json(model),
        b',"service_tier":' + SERVICE_TIER if show_tier else b"",
    )


def usage_field(usage: TokenUsage) -> dict[str, Any]:
    """The usage object of an event."""
    details: dict[str, Any] | None = None
    if usage.cached_tokens is not None:
        details = {"cached_tokens": usage.cached_tokens}
    if usage.image_tokens:
        details = {**(details or {}), "image_tokens": usage.image_tokens}
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": details,
    }
    if usage.reasoning_tokens is not None:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields


def whole_usage_field(usage: TokenUsage) -> dict[str, Any]:
    """The usage object of a whole reply."""
    fields = usage_field(usage)
    if fields["prompt_tokens_details"] is not None:
        of_images = {"image": usage.image_tokens} if usage.image_tokens else None
        fields["prompt_tokens_details"] |= {"created_cache_tokens": None, "multimodal_tokens": of_images}
    fields.setdefault("completion_tokens_details", None)
    return fields
