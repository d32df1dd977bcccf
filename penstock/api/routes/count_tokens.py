"""The routes that count the tokens of a request's prompt, for all APIs that have one."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.api.byte_budget import ByteBudget
from penstock.api.exchange import Exchange, Handler
from penstock.api.routes.tokenize import MAX_TOKENS
from penstock.config.serve import ServeConfig
from penstock.generation.dialect import RequestInfo, TokenCounter
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.prompt.tokenizer import INLINE_SLOW
from penstock.http.asgi import first_headers, read_body, request_header, send_json, unless_gone
from penstock.http.errors import ApiError


class CountTokensRoutes:
    """Counts as a request for generation would: same rendering, same tokenizer, same cache of segments."""

    def __init__(
        self, config: ServeConfig, encoder: PromptEncoder, max_model_len: int, large: ByteBudget
    ) -> None:
        """``large``: for requests that threads work on."""
        self._config = config
        self._encoder = encoder
        self._most = max(MAX_TOKENS, max_model_len)
        self._large = large

    def handler(self, counter: TokenCounter) -> Handler:
        """The handler of the counter's route."""
        return partial(self._answer, counter)

    async def _answer(self, counter: TokenCounter, exchange: Exchange) -> None:
        body = await read_body(exchange.scope, exchange.receive, self._config.max_request_bytes)
        info = RequestInfo(
            request_header(exchange.scope, b"x-request-id"), exchange.tenant, first_headers(exchange.scope)
        )
        looking = counter.look_up(body, info)
        found = None if looking is None else await looking
        size = len(body) + (0 if found is None else found.size)
        if size <= INLINE_SLOW:
            reply = self._counted(counter, body, info, found)
        else:
            counted = self._large.run_in_thread(size, self._counted, counter, body, info, found)
            reply = await unless_gone(exchange.receive, counted)
        await send_json(exchange.send, reply)

    def _counted(self, counter: TokenCounter, body: bytes, info: RequestInfo, found: Any) -> bytes:
        text, add_special_tokens, cache_salt = counter.prompt(body, info, found)
        if self._encoder.tokenizer.is_longer(text, self._most):
            raise ApiError(
                400,
                f"The prompt has at least {self._most + 1} tokens, at most {self._most} are counted.",
                param="input_tokens",
            )
        if info.tenant is not None and not self._config.shared_prefix_cache:
            cache_salt = info.tenant + (cache_salt or "")
        _, count = self._encoder.encode(text, add_special_tokens, cache_salt)
        return counter.reply(count)
