"""``/tokenize`` and ``/detokenize``: vLLM's routes from text to token ids and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np

from penstock.api.api_request import ApiRequest
from penstock.api.byte_budget import ByteBudget
from penstock.config.serve import ServeConfig
from penstock.dialects.chat import request_schema as chat
from penstock.generation.input_processor import InputProcessor, opens_turn
from penstock.generation.media.preparation import PicturePreparation
from penstock.generation.media.source import ImageSource
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.prompt.prompts import check_vocabulary
from penstock.generation.prompt.tokenizer import INLINE_SLOW
from penstock.generation.request.schemas import JsonObject, Message, PromptToken, Tool, about
from penstock.http.errors import ApiError, encode_json
from penstock.http.request import beyond_option
from penstock.wire.arrays import I32

Made = TypeVar("Made")

MAX_TOKENS = 1 << 19
"""Maximum tokens of a text that is tokenized or counted, unless the context is longer."""
MAX_DETOKENIZED = 1 << 16
"""Maximum token ids for /detokenize, likewise. The tokenizer holds the GIL meanwhile: 0.1 s for so many."""

JSON_PIECE = 1 << 15
"""Items of a list that become JSON at a time: 1 ms."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: Annotated[str | None, about("A text to tokenize.")] = None
    messages: Annotated[list[Message] | None, about("A conversation to render and tokenize.")] = None
    add_special_tokens: Annotated[bool | None, about("Default: true for prompt, false for messages.")] = None
    return_token_strs: Annotated[bool | None, about("Also return the tokens as strings.")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: list[Tool] | None = None
    chat_template: str | None = None
    media_io_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[PromptToken]
    model: str | None = None


UNSUPPORTED = tuple(
    row
    for row in chat.UNSUPPORTED
    if row.field in ("chat_template", "media_io_kwargs", "mm_processor_kwargs")
)


class TokenizePlan(NamedTuple):
    """A checked /tokenize request."""

    text: str
    add_special_tokens: bool
    return_token_strs: bool
    field: str = "prompt"
    """The field that the text is from."""
    prefix: bytes = b""
    """Token ids before the text, as int32."""
    images: Sequence[ImageSource] = ()
    """The pictures that it shows."""


class EncodedPrompts:
    """Prompts as their ids, those of their pictures included."""

    def __init__(self, encoder: PromptEncoder, large: ByteBudget, media: PicturePreparation | None) -> None:
        """``large``: for prompts that threads work on. ``media``: without, no prompt has pictures."""
        self.encoder = encoder
        self._large = large
        self._media = media

    async def with_pictures(
        self,
        request: ApiRequest,
        text: str,
        add_special_tokens: bool,
        salt: str,
        images: Sequence[ImageSource],
    ) -> bytes:
        """The ids of a prompt that shows ``images``. Raises ApiError."""
        assert self._media is not None, "a model without pictures has no prompts with them"
        pictures = self._media.pictures()
        try:
            await request.http.unless_gone(pictures.prepare(images, salt))
            encode = partial(pictures.encode, self.encoder, text, add_special_tokens, salt or None)
            made = await request.http.unless_gone(self._large.run_in_thread(len(text), encode))
            return made.ids
        finally:
            pictures.release()


def _json_list(ids: I32, items: Callable[[list[int]], Sequence[object]]) -> bytes:
    """``items`` of all ids as a JSON list, made of pieces between which other threads run."""
    pieces = (ids[at : at + JSON_PIECE].tolist() for at in range(0, len(ids), JSON_PIECE))
    return b"[%b]" % b",".join([encode_json(items(piece))[1:-1] for piece in pieces])


class TokenizeRoutes:
    """The handlers."""

    def __init__(
        self,
        processor: InputProcessor,
        encoder: PromptEncoder,
        config: ServeConfig,
        large: ByteBudget,
        media: PicturePreparation | None = None,
    ) -> None:
        """``large``: for requests that threads work on. ``media``: see :class:`EncodedPrompts`."""
        self._prompts = EncodedPrompts(encoder, large, media)
        self._shared_prefix_cache = config.shared_prefix_cache
        self._processor = processor
        self._encoder = encoder
        self._tokenizer = encoder.tokenizer
        self._max_request_bytes = config.max_request_bytes
        self._large = large
        self._tokenize_decoder = processor.decoder(TokenizeRequest)
        self._detokenize_decoder = processor.decoder(DetokenizeRequest)
        self._unsupported = processor.unsupported(UNSUPPORTED)

    async def tokenize(self, request: ApiRequest) -> None:
        salt = None if self._shared_prefix_cache else request.tenant
        body = await request.http.read_json(self._max_request_bytes, beyond_option)
        reply = await self._made(request, len(body), self.tokenized, body, salt)
        if isinstance(reply, TokenizePlan):
            text, special, salt = reply.text, reply.add_special_tokens, salt or ""
            ids = await self._prompts.with_pictures(request, text, special, salt, reply.images)
            reply = await self._made(request, len(ids), self._listed, reply, ids)
        await request.http.reply_json(reply)

    async def detokenize(self, request: ApiRequest) -> None:
        body = await request.http.read_json(self._max_request_bytes, beyond_option)
        await request.http.reply_json(await self._made(request, len(body), self.detokenized, body))

    async def _made(
        self, request: ApiRequest, size: int, make: Callable[..., Made], *arguments: object
    ) -> Made:
        """What ``make`` makes of so many bytes, in a thread if they are many."""
        if size <= INLINE_SLOW:
            return make(*arguments)
        return await request.http.unless_gone(self._large.run_in_thread(size, make, *arguments))

    def tokenized(self, body: bytes, cache_salt: str | None = None) -> bytes | TokenizePlan:
        """The reply of /tokenize; the plan of a prompt with pictures, which are to be prepared before.
        ``cache_salt``: of the ids that are kept. Raises ApiError."""
        plan = self.tokenize_plan(body)
        most = max(MAX_TOKENS, self._processor.model_info.max_model_len)
        if self._tokenizer.is_longer(plan.text, most):
            raise ApiError(
                400,
                f"{plan.field} has at least {most + 1} tokens, at most {most} are allowed.",
                param=plan.field,
            )
        if plan.images:
            return plan
        # routers ask for the ids of a conversation before they send it: it is encoded once
        encoded, _ = self._encoder.encode(plan.text, plan.add_special_tokens, cache_salt)
        return self._listed(plan, plan.prefix + encoded)

    def _listed(self, plan: TokenizePlan, encoded: bytes) -> bytes:
        """The reply for a prompt with these ids. Raises ApiError."""
        most = max(MAX_TOKENS, self._processor.model_info.max_model_len)
        ids = np.frombuffer(encoded, np.int32)
        if len(ids) > most:
            raise ApiError(
                400, f"{plan.field} has {len(ids)} tokens, at most {most} are allowed.", param=plan.field
            )
        strings = b"null"
        if plan.return_token_strs:
            strings = _json_list(ids, self._tokenizer.token_strings)
        return b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
            len(ids),
            self._processor.model_info.max_model_len,
            _json_list(ids, list),
            strings,
        )

    def detokenized(self, body: bytes) -> bytes:
        """The reply of /detokenize. Raises ApiError."""
        return encode_json({"prompt": self._tokenizer.decode(self.detokenize_plan(body))})

    def tokenize_plan(self, body: bytes) -> TokenizePlan:
        """Check a body of /tokenize. Raises ApiError."""
        request = self._tokenize_decoder.decode(body)
        self._unsupported.check_fields(request)
        self._processor.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "Exactly one of prompt and messages is needed.", param="prompt")
        special = request.add_special_tokens
        if request.messages is None:
            return TokenizePlan(request.prompt or "", special is not False, bool(request.return_token_strs))
        content = self._processor.unsupported_content()
        content.replace_parts(request.messages)
        prefix, text = self._processor.continue_sampled(
            request.messages,
            add_generation_prompt=opens_turn(request.add_generation_prompt, request.continue_final_message),
            continue_final_message=bool(request.continue_final_message),
            tools=request.tools,
            variables=request.chat_template_kwargs,
        )
        content.note_shown(request.messages)
        special, strings = bool(special) and not prefix, bool(request.return_token_strs)
        return TokenizePlan(text, special, strings, "messages", prefix, content.shown_images)

    def detokenize_plan(self, body: bytes) -> list[int]:
        """Check a body of /detokenize; returns its token ids. Raises ApiError."""
        request = self._detokenize_decoder.decode(body)
        self._processor.check_model(request.model)
        most = max(MAX_DETOKENIZED, self._processor.model_info.max_model_len)
        if len(request.tokens) > most:
            raise ApiError(
                400, f"tokens has {len(request.tokens)} ids, at most {most} are allowed.", param="tokens"
            )
        if request.tokens:
            check_vocabulary("tokens", max(request.tokens), self._processor.model_info.vocab_size)
        return request.tokens
