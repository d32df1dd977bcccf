"""The routes that count the tokens of a request's prompt, for all APIs that have one."""

from __future__ import annotations

import asyncio
from functools import partial

from penstock.api.api_request import ApiRequest, Handler
from penstock.api.byte_budget import ByteBudget
from penstock.api.planning import MAX_LOOK_UPS
from penstock.api.routes.tokenize import MAX_TOKENS, EncodedPrompts
from penstock.config.serve import ServeConfig
from penstock.generation.dialect import CountedPrompt, LookedUp, RequestInfo, TokenCounter
from penstock.generation.media.preparation import PicturePreparation
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.prompt.tokenizer import INLINE_SLOW
from penstock.http.errors import ApiError
from penstock.http.request import beyond_option


class CountTokensRoutes:
    """Counts as a request for generation would: same rendering, same tokenizer, same cache of segments."""

    def __init__(
        self,
        config: ServeConfig,
        encoder: PromptEncoder,
        max_model_len: int,
        large: ByteBudget,
        media: PicturePreparation | None = None,
    ) -> None:
        """``large``: for requests that threads work on. ``media``: see :class:`EncodedPrompts`."""
        self._config = config
        self._prompts = EncodedPrompts(encoder, large, media)
        self._encoder = encoder
        self._most = max(MAX_TOKENS, max_model_len)
        self._large = large
        self._look_ups = asyncio.Semaphore(MAX_LOOK_UPS)

    def handler(self, counter: TokenCounter) -> Handler:
        """The handler of the counter's route."""
        return partial(self._answer, counter)

    async def _answer(self, counter: TokenCounter, request: ApiRequest) -> None:
        body = await request.http.read_json(self._config.max_request_bytes, beyond_option)
        info = RequestInfo(request.http.header(b"x-request-id"), request.tenant, path=request.http.path)
        looking = counter.look_up(body, info)
        if looking is None:
            reply = await self._reply(request, len(body), counter, body, info, None)
        else:
            async with self._look_ups:
                found = await looking
                reply = await self._reply(request, len(body) + found.size, counter, body, info, found)
        await request.http.reply_json(reply)

    async def _reply(
        self,
        request: ApiRequest,
        size: int,
        counter: TokenCounter,
        body: bytes,
        info: RequestInfo,
        found: LookedUp | None,
    ) -> bytes:
        """The reply's body; ``size``: bytes that there are to read."""
        if size <= INLINE_SLOW:
            counted = self._counted(counter, body, info, found)
        else:
            waiting = self._large.run_in_thread(size, self._counted, counter, body, info, found)
            counted = await request.http.unless_gone(waiting)
        if isinstance(counted, CountedPrompt):
            text, special, salt, images = counted
            ids = await self._prompts.with_pictures(request, text, special, salt or "", images)
            counted = len(ids) // 4
        return counter.reply(counted)

    def _counted(
        self, counter: TokenCounter, body: bytes, info: RequestInfo, found: LookedUp | None
    ) -> int | CountedPrompt:
        """The number of tokens; a prompt with pictures, which are to be prepared before."""
        text, add_special_tokens, cache_salt, images = counter.prompt(body, info, found)
        if self._encoder.tokenizer.is_longer(text, self._most):
            raise ApiError(
                400,
                f"The prompt has at least {self._most + 1} tokens, at most {self._most} are counted.",
                param="input_tokens",
            )
        if info.tenant is not None and not self._config.shared_prefix_cache:
            cache_salt = info.tenant + (cache_salt or "")
        if images:
            return CountedPrompt(text, add_special_tokens, cache_salt, images)
        _, count = self._encoder.encode(text, add_special_tokens, cache_salt)
        return count
