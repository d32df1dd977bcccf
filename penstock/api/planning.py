"""From a body to its plan and to its prompts, on the event loop or in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from penstock.api.api_request import SESSION, ApiRequest
from penstock.api.byte_budget import ByteBudget
from penstock.config.serve import ServeConfig
from penstock.generation.dialect import Dialect, LookedUp, RequestInfo
from penstock.generation.media.lifting import LiftedBody
from penstock.generation.media.preparation import PicturePreparation, Pictures
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.prompt.render_limit import RenderTimeout, on_event_loop
from penstock.generation.prompt.tokenizer import ESTIMATED_ABOVE, PIECE
from penstock.generation.prompt.turn_memory import NextTurn, TurnMemory
from penstock.generation.replies.columns import plan_columns
from penstock.generation.replies.reply import Prompt
from penstock.generation.replies.safetensors_writer import SAFETENSORS
from penstock.generation.request.validation import check_prompt_len, check_streamed_echo
from penstock.http.accept import asks_for
from penstock.http.errors import ApiError
from penstock.http.request import JSON
from penstock.http.sink import Headers

INLINE_BODY = 32 * 1024
"""Largest body in bytes, with what it continues, that is planned on the event loop, which takes at most 10 ms
(measured: up to 0.3 us a byte); larger ones are planned in a thread."""
RESTORED_INLINE = 1 << 20
"""Largest body of which a stored copy is made on the event loop, which takes at most 2 ms."""
RESUMED_BYTES, RESUMED_MESSAGES = 1 << 20, 1000
"""Largest conversation that is planned on the event loop because all but INLINE_BODY of it is known from the
turn before: if its template starts anew after all, that takes about 5 ms."""
THREADS_BYTES = 16 << 20
"""Bytes of bodies and texts that threads work on at the same time; a larger one is worked on alone."""
MAX_LOOK_UPS = 8
"""Requests that are planned with what they continue at the same time: each may hold 16 MiB of it."""
EVENTS = b"text/event-stream"
TRUNCATED = 4
"""A prompt that is to be truncated may have this many times the context."""

Result = TypeVar("Result")


class RequestPlanner:
    """Plans the requests of all dialects, prepares their pictures and encodes their prompts."""

    def __init__(
        self,
        config: ServeConfig,
        encoder: PromptEncoder,
        large: ByteBudget,
        media: PicturePreparation | None,
        check_open: Callable[[], None],
    ) -> None:
        """``large``: for requests that threads work on. ``media``: without, no request has pictures.
        ``check_open``: raises ApiError once the server takes no more requests; called after each wait."""
        self.turns = TurnMemory(config.turn_memory)
        self._config = config
        self._encoder = encoder
        self._tokenizer = encoder.tokenizer
        self._large = large
        self._media = media
        self._check_open = check_open
        self._look_ups = asyncio.Semaphore(MAX_LOOK_UPS)

    def planned(
        self, request: ApiRequest, dialect: Dialect, body: bytes, accept: Headers
    ) -> Coroutine[Any, Any, tuple[RequestPlan, list[Prompt] | None, RequestInfo]]:
        """The plan of a body. Raises ApiError."""
        if dialect.lifts_images and self._media is not None and len(body) > INLINE_BODY:
            lifted = LiftedBody(body)
            if lifted.parts:
                return self._planned_lifted(request, dialect, accept, lifted)
        return self._planned(request, dialect, body, accept, None)

    async def _planned_lifted(
        self, request: ApiRequest, dialect: Dialect, accept: Headers, lifted: LiftedBody
    ) -> tuple[RequestPlan, list[Prompt] | None, RequestInfo]:
        """As :meth:`planned`. What is refused is refused for the whole body: an error quotes what the client
        sent, and no name of a part."""
        try:
            return await self._planned(request, dialect, lifted.body, accept, lifted)
        except ApiError as error:
            if error.status >= 500:
                raise
        return await self._planned(request, dialect, lifted.whole, accept, None)

    async def _planned(
        self,
        request: ApiRequest,
        dialect: Dialect,
        body: bytes,
        accept: Headers,
        lifted: LiftedBody | None,
    ) -> tuple[RequestPlan, list[Prompt] | None, RequestInfo]:
        turn = self.turns.begin(request.tenant, len(body))
        derived = request.http.derived
        session = None if derived is None else derived.get(SESSION)
        http = request.http
        asked = http.header(b"x-request-id")
        info = RequestInfo(asked, request.tenant, accept, session, turn, http.path, http.target)
        if lifted is not None:
            info = info._replace(restored=lifted.restored)
        looking = dialect.look_up(body, info)
        if looking is None:
            return (*await self._plan_lifted(request, dialect, body, info, None, lifted), info)
        async with self._look_ups:
            found = await looking
            self._check_open()
            size = len(body) + found.size
            info = info._replace(turn=self.turns.go_on(info.tenant, found.conversation, size))
            return (*await self._plan_lifted(request, dialect, body, info, found, lifted), info)

    async def _plan_lifted(
        self,
        request: ApiRequest,
        dialect: Dialect,
        body: bytes,
        info: RequestInfo,
        found: LookedUp | None,
        lifted: LiftedBody | None,
    ) -> tuple[RequestPlan, list[Prompt] | None]:
        """The plan of a body without what was lifted, or of the whole one if some of that is no picture."""
        earlier = 0 if found is None else found.size
        if lifted is None:
            return await self._plan_anywhere(request, len(body) + earlier, dialect, body, info, found)
        size, whole = len(body) + earlier, lifted.whole
        if dialect.stores_images and len(whole) > RESTORED_INLINE:
            size = len(whole) + earlier
        plan, prompts = await self._plan_anywhere(request, size, dialect, body, info, found)
        if lifted.are_seen(plan.images):
            plan.image_parts = lifted.parts
            return plan, prompts
        return await self._plan_anywhere(request, len(whole) + earlier, dialect, whole, info, found)

    async def prepare_images(self, request: ApiRequest, plan: RequestPlan) -> None:
        """Have the pictures of a plan prepared, if it has any. They are released with the request."""
        if not plan.images:
            return
        assert self._media is not None, "a model without pictures has no plans with them"
        images, parts, plan.images = plan.images, plan.image_parts, ()
        plan.pictures = pictures = self._media.pictures()
        request.pictures = (*request.pictures, pictures)
        salt = plan.cache_salt or ""
        if not pictures.recall(images, salt, parts):
            await request.http.unless_gone(pictures.prepare(images, salt, parts))
            self._check_open()

    def _plan(
        self, dialect: Dialect, body: bytes, info: RequestInfo, found: LookedUp | None, *, tokenize: bool
    ) -> tuple[RequestPlan, list[Prompt] | None]:
        """The plan of a body and, with ``tokenize``, its prompts. Raises ApiError."""
        plan = dialect.plan(body, info, found)
        if info.turn is not None and len(plan.prompts) == 1 and not plan.prefix:
            plan.turn, info.turn.salt = info.turn, plan.cache_salt or ""
        plan = self.salted(plan, info)
        if info.accept and asks_for(info.accept, SAFETENSORS, EVENTS if plan.stream else JSON):
            plan_columns(plan)
        if not tokenize or plan.compaction is not None or plan.images:
            return plan, None
        return plan, self.tokenize_all(plan)

    def salted(self, plan: RequestPlan, info: RequestInfo) -> RequestPlan:
        if info.tenant is not None and not self._config.shared_prefix_cache:
            plan.cache_salt = info.tenant + (plan.cache_salt or "")
        return plan

    async def in_thread(
        self, request: ApiRequest, size: int, work: Callable[..., Result], *arguments: Any
    ) -> Result:
        made = await request.http.unless_gone(self._large.run_in_thread(size, work, *arguments))
        self._check_open()
        return made

    def lengths(self, plan: RequestPlan, threshold: int) -> list[Prompt]:
        """The prompts of a plan; one that is too long for the context, and longer than ``threshold``, has no
        tokens."""
        [text] = plan.prompts
        if isinstance(text, str) and self._tokenizer.is_longer(text, plan.max_model_len):
            return [Prompt(b"", max(plan.max_model_len, threshold) + 1)]
        return self.tokenize_all(plan)

    async def _plan_anywhere(
        self,
        request: ApiRequest,
        size: int,
        dialect: Dialect,
        body: bytes,
        info: RequestInfo,
        found: LookedUp | None,
    ) -> tuple[RequestPlan, list[Prompt] | None]:
        """Plan the request and encode its prompts, in a thread if that takes long; ``size``: bytes that there
        are to read."""
        if size <= INLINE_BODY or (found is not None and _is_known(size, len(body), found, info.turn)):
            try:
                return on_event_loop(self._plan, dialect, body, info, found, tokenize=False)
            except RenderTimeout:
                pass
        plan = partial(self._plan, dialect, body, info, found, tokenize=True)
        made = await request.http.unless_gone(self._large.run_in_thread(size, plan))
        self._check_open()
        return made

    # -- prompts

    async def tokenized(self, request: ApiRequest, plan: RequestPlan) -> list[Prompt]:
        """The prompts of a plan; long ones are made in a thread. Raises ApiError."""
        prompts = self._tokenize(plan)
        if prompts is None:
            prompts = await self.in_thread(request, characters(plan), self.tokenize_all, plan)
        return prompts

    def _tokenize(self, plan: RequestPlan) -> list[Prompt] | None:
        """Token ids of all prompts; None if they are so long that a thread should make them."""
        most = self._tokenizer.inline_characters[plan.add_special_tokens]
        if characters(plan) > most and self._unknown_characters(plan) > most:
            return None
        return self.tokenize_all(plan)

    def _unknown_characters(self, plan: RequestPlan) -> int:
        """What there is to tokenize besides what the turn before had."""
        prompt, turn = plan.prompts[0], plan.turn
        if turn is None or plan.echo or not isinstance(prompt, str):
            return characters(plan)
        if len(prompt) > ESTIMATED_ABOVE * plan.max_model_len:  # it may be encoded twice
            return len(prompt)
        return self._encoder.unknown_characters(prompt, plan.add_special_tokens, turn)

    def tokenize_all(self, plan: RequestPlan) -> list[Prompt]:
        prompts = [self._prompt(plan, prompt) for prompt in plan.prompts]
        turn, plan.turn = plan.turn, None
        if turn is not None:
            turn.keep()
        return prompts

    def _prompt(self, plan: RequestPlan, prompt: str | bytes) -> Prompt:
        if isinstance(prompt, str):
            if len(prompt) > PIECE:
                self._check_text(plan, prompt)
            if plan.pictures is not None:
                return self._prompt_with_pictures(plan, prompt, plan.pictures)
            ids, length = self._encoder.encode(prompt, plan.add_special_tokens, plan.cache_salt, plan.turn)
            if plan.prefix:
                ids, length = plan.prefix + ids, length + len(plan.prefix) // 4
            echo = prompt if plan.echo else plan.echo_text
        else:
            ids, length = prompt, len(prompt) // 4
            echo = self._tokenizer.decode(memoryview(ids).cast("i").tolist()) if plan.echo else ""
        known = None if plan.turn is None else plan.turn.prefix
        if plan.truncate_prompt_tokens is not None:
            ids, known = plan.truncate(ids), None
            length = len(ids) // 4
        if plan.stream and plan.echo and plan.logprobs >= 0:
            check_streamed_echo(length, plan.logprobs)
        return Prompt(ids, length, echo, known=known)

    def _prompt_with_pictures(self, plan: RequestPlan, text: str, pictures: Pictures) -> Prompt:
        if plan.truncate_prompt_tokens is not None:
            raise ApiError(
                400,
                "truncate_prompt_tokens: a prompt with images cannot be cut; leave it out.",
                param="truncate_prompt_tokens",
            )
        ids, media, routed = pictures.encode(
            self._encoder, text, plan.add_special_tokens, plan.cache_salt, plan.turn
        )
        return Prompt(ids, len(ids) // 4, plan.echo_text, media=media, routed=routed)

    def _check_text(self, plan: RequestPlan, text: str) -> None:
        """Raises ApiError for a text of which a part shows that it is too long."""
        most = plan.max_model_len
        if plan.truncate_prompt_tokens is None:
            if self._tokenizer.is_longer(text, most):
                check_prompt_len(most + 1, most)
        elif self._tokenizer.is_longer(text, most * TRUNCATED):
            raise ApiError(
                400,
                f"The prompt has more than {most * TRUNCATED} tokens, {TRUNCATED} times the context: "
                "too many for truncate_prompt_tokens.",
                param="truncate_prompt_tokens",
            )


def _is_known(size: int, body: int, found: LookedUp, turn: NextTurn | None) -> bool:
    """Whether the turn before has all but a little of a conversation of ``size`` bytes, ``body`` of them in
    the request."""
    if turn is None or size > RESUMED_BYTES or not turn.resumes(RESUMED_MESSAGES):
        return False
    return body + found.unknown_bytes(turn) <= INLINE_BODY


def characters(plan: RequestPlan) -> int:
    """What there is to tokenize, and token ids to decode for an echo."""
    characters = 0
    for prompt in plan.prompts:
        if isinstance(prompt, str):
            characters += len(prompt)
        elif plan.echo:
            characters += len(prompt) // 4
    return characters
