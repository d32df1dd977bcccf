"""The generating routes: from a request body to submitted streams and to the end of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.api.api_request import SESSION, ApiRequest, Handler
from penstock.api.background import BackgroundResponses
from penstock.api.byte_budget import ByteBudget
from penstock.api.event_follower import follow
from penstock.api.queue_capacity import check_queue_capacity
from penstock.api.routes.load_report import FORMAT_HEADER, load_report
from penstock.api.time_sliced_sender import TimeSlicedSender
from penstock.config.serve import ServeConfig
from penstock.dispatch.connections import MAX_QUEUED_BYTES
from penstock.dispatch.engine_client import NO_HINTS, RoutingHints
from penstock.generation.compaction.planned import PlannedCompaction, Summary, SummaryText
from penstock.generation.dialect import Dialect, LookedUp, ReplyFormat, RequestInfo
from penstock.generation.grammars.checker import GrammarChecker
from penstock.generation.media.lifting import LiftedBody
from penstock.generation.media.preparation import PicturePreparation, Pictures
from penstock.generation.plan import RequestPlan, constrain
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.prompt.render_limit import RenderTimeout, on_event_loop
from penstock.generation.prompt.tokenizer import ESTIMATED_ABOVE, PIECE
from penstock.generation.prompt.turn_memory import NextTurn, TurnMemory
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.columns import ColumnsReply, plan_columns
from penstock.generation.replies.reply import Prompt, RequestContext
from penstock.generation.replies.safetensors_writer import SAFETENSORS
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.replies.streamed import NOT_KEPT, StreamedReply
from penstock.generation.request.validation import (
    MAX_LOGPROB_BYTES,
    check_prompt_len,
    check_streamed_echo,
    wide_prompt_logprob_bytes,
)
from penstock.http.accept import asks_for
from penstock.http.admission import no_engine, overloaded, unavailable
from penstock.http.errors import ApiError
from penstock.http.request import JSON, ClientGone, HttpRequest, beyond_option
from penstock.http.sink import Headers
from penstock.store.stored_response import StoredResponse
from penstock.wire.messages import AdapterKey, SamplingParams, Submit

INLINE_BODY = 32 * 1024
"""Largest body in bytes, with what it continues, that is planned on the event loop, which takes at most 10 ms
(measured: up to 0.3 us a byte); larger ones are planned in a thread."""
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


RANK_HEADER, SESSION_HEADER = b"x-data-parallel-rank", b"x-session-id"
MAX_RANK_DIGITS = 20
"""Maximum digits of X-data-parallel-rank, leading zeros included."""


Result = TypeVar("Result")


class Work(msgspec.Struct, gc=False):
    """A checked and tokenized request."""

    plan: RequestPlan
    format: ReplyFormat
    hints: RoutingHints
    prompts: list[Prompt]
    samplings: list[SamplingParams]
    """One per choice of each prompt."""
    ids: tuple[str, ...]
    """By which clients know the request."""
    trace: str = ""
    """For the engines' spans; empty: they make none."""


class GenerationRoutes:
    """Runs the requests of all dialects."""

    def __init__(
        self,
        config: ServeConfig,
        encoder: PromptEncoder,
        context: RequestContext,
        large: ByteBudget,
        background: BackgroundResponses | None = None,
        media: PicturePreparation | None = None,
    ) -> None:
        """``large``: for requests that threads work on. ``background``: without, no reply has an entry.
        ``media``: without, no request has pictures."""
        self.turns = TurnMemory(config.turn_memory)
        self._config = config
        self._background = background
        self._media = media
        self._constrains = config.engine != "synthetic" or config.synthetic_script is not None
        """Whether the engines apply grammars."""
        self._encoder = encoder
        self._tokenizer = encoder.tokenizer
        self._context = context
        self._engine_client = context.engine_client
        self._streams = context.streams
        self._grammars = GrammarChecker()
        self._sender = TimeSlicedSender(context.turns)
        self._large = large
        self._look_ups = asyncio.Semaphore(MAX_LOOK_UPS)
        self.draining = False
        self._logprob_bytes = 0
        """Reserved for requests with very many logprobs per token."""
        self._running = 0
        self._idle = asyncio.Event()
        """Set while no request runs."""
        self._idle.set()

    def close(self) -> None:
        """End the child processes."""
        self._grammars.close()

    def handler(self, dialect: Dialect) -> Handler:
        """The handler of the dialect's route."""
        return partial(self._run, dialect)

    async def drain(self) -> None:
        """Refuse new requests and wait for the end of running ones."""
        self.draining = True
        await self._idle.wait()

    @property
    def idle(self) -> bool:
        """Whether no request runs."""
        return not self._running

    def on_request_end(self, request: ApiRequest) -> None:
        """A request has ended; called from outside if its reply is detached."""
        self.end_one(request.logprob_bytes, request.pictures)
        request.pictures = ()

    def begin_one(self) -> None:
        self._running += 1
        self._idle.clear()

    def end_one(self, logprob_bytes: int, pictures: Sequence[Pictures] = ()) -> None:
        for each in pictures:
            each.release()
        self._logprob_bytes -= logprob_bytes
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def _run(self, dialect: Dialect, request: ApiRequest) -> None:
        self.begin_one()
        try:
            body = await request.http.read_json(self._config.max_request_bytes, beyond_option)
            self.check_open()
            accept = _named_types(dialect, request)
            lifted = None
            if dialect.lifts_images and self._media is not None and len(body) > INLINE_BODY:
                lifted = LiftedBody(body)
            plan, prompts, info = await self._planned(request, dialect, body, accept, lifted)
            del body  # not kept while the reply is generated
            if plan.answer is not None:
                await request.http.reply_json(plan.answer)
                return
            del lifted
            if plan.images:
                await self._prepare_images(request, plan)
            if plan.compaction is not None:
                plan, prompts = await self._compacted(request, dialect, plan, prompts, info)
            if plan.warning is not None:
                request.add_headers((b"warning", b'299 penstock "%b"' % plan.warning.encode()))
            if plan.constraint is not None and self._constrains:
                checked = self._grammars.check_grammar(plan.constraint, request.client)
                constrain(plan, await request.http.unless_gone(checked))
                self.check_open()
            elif plan.constraint is not None and plan.constraint.optional:
                constrain(plan, None)
            hints = self.routing_hints(request.http, plan.session)
            if plan.images:
                await self._prepare_images(request, plan)
            if prompts is None:
                prompts = self._tokenize(plan)
            if prompts is None:
                prompts = await self.in_thread(request, _characters(plan), self._tokenize_all, plan)
            plan.prompts = plan.image_parts = ()  # nor are their texts
            if dialect.renders:
                await self._sender.send_json(
                    request, dialect.rendered(plan, prompts, request.request_id, self._context)
                )
                return
            work = self._work(request, dialect, plan, hints, prompts)
            entry = work.format.background_entry()
            if entry is not None:
                await asyncio.ensure_future(self._run_in_background(work, entry, request))
            elif plan.stream:
                self._stream(work, request)
            else:
                await self._collect(work, request)
        finally:
            if not request.detached:
                self.on_request_end(request)

    async def _planned(
        self, request: ApiRequest, dialect: Dialect, body: bytes, accept: Headers, lifted: LiftedBody | None
    ) -> tuple[RequestPlan, list[Prompt] | None, RequestInfo]:
        """The plan of a body. Raises ApiError."""
        if lifted is not None:
            body = lifted.body
        turn = self.turns.begin(request.tenant, len(body))
        derived = request.http.derived
        session = None if derived is None else derived.get(SESSION)
        http = request.http
        asked = http.header(b"x-request-id")
        info = RequestInfo(asked, request.tenant, accept, session, turn, http.path, http.target)
        looking = dialect.look_up(body, info)
        if looking is not None:
            return (*await self._plan_continued(request, dialect, body, info, looking), info)
        plan, prompts = await self._plan_anywhere(request, len(body), dialect, body, info, None)
        if lifted is not None and lifted.parts:
            if lifted.are_seen(plan.images):
                plan.image_parts = lifted.parts
            else:
                whole = lifted.whole
                plan, prompts = await self._plan_anywhere(request, len(whole), dialect, whole, info, None)
        return plan, prompts, info

    async def _prepare_images(self, request: ApiRequest, plan: RequestPlan) -> None:
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
            self.check_open()

    def _plan(
        self, dialect: Dialect, body: bytes, info: RequestInfo, found: LookedUp | None, *, tokenize: bool
    ) -> tuple[RequestPlan, list[Prompt] | None]:
        """The plan of a body and, with ``tokenize``, its prompts. Raises ApiError."""
        plan = dialect.plan(body, info, found)
        if info.turn is not None and len(plan.prompts) == 1 and not plan.prefix:
            plan.turn, info.turn.salt = info.turn, plan.cache_salt or ""
        plan = self._salted(plan, info)
        if info.accept and asks_for(info.accept, SAFETENSORS, EVENTS if plan.stream else JSON):
            plan_columns(plan)
        if not tokenize or plan.compaction is not None or plan.images:
            return plan, None
        return plan, self._tokenize_all(plan)

    def _salted(self, plan: RequestPlan, info: RequestInfo) -> RequestPlan:
        if info.tenant is not None and not self._config.shared_prefix_cache:
            plan.cache_salt = info.tenant + (plan.cache_salt or "")
        return plan

    async def in_thread(
        self, request: ApiRequest, size: int, work: Callable[..., Result], *arguments: Any
    ) -> Result:
        made = await request.http.unless_gone(self._large.run_in_thread(size, work, *arguments))
        self.check_open()
        return made

    async def _compacted(
        self,
        request: ApiRequest,
        dialect: Dialect,
        plan: RequestPlan,
        prompts: list[Prompt] | None,
        info: RequestInfo,
    ) -> tuple[RequestPlan, list[Prompt] | None]:
        """The plan of a request, or if its prompt is long the one that goes on with a summary of it. A
        summary that fails changes nothing: the request goes on if it fits."""
        compaction: PlannedCompaction = plan.compaction
        plan.compaction = None  # nor is it kept, with all that it refers to
        size = _characters(plan)
        if prompts is None:
            prompts = await self.in_thread(request, size, self._lengths, plan, compaction.threshold)
        if prompts[0].length <= compaction.threshold:
            return plan, prompts
        planned = self._salted(await self.in_thread(request, size, compaction.summary_plan), info)
        planned.image_parts = plan.image_parts
        await self._prepare_images(request, planned)
        asked = await self.in_thread(request, _characters(planned), self._tokenize_all, planned)
        answer = dialect.reply_format(plan, request.request_id)
        format = SummaryText(answer.api, answer.id)
        sampling = planned.sampling(asked[0].length)
        hints = self.routing_hints(request.http, plan.session)
        work = Work(planned, format, hints, asked, [sampling], (request.request_id, format.id))
        collected = CollectedReply(self._context, planned, format, request.arrival)
        request.http.sink.listen(collected)
        self._submit(collected, work)
        error = await collected.done
        if collected.left:
            raise ClientGone
        self.check_open()
        text = format.text if error is None else ""
        resumed = await self.in_thread(request, size, compaction.resumed, Summary(text, collected.usage()))
        if resumed is None:
            return plan, prompts
        resumed.image_parts = plan.image_parts
        return self._salted(resumed, info), None

    def _lengths(self, plan: RequestPlan, threshold: int) -> list[Prompt]:
        """The prompts of a plan; one that is too long for the context, and longer than ``threshold``, has no
        tokens."""
        [text] = plan.prompts
        if isinstance(text, str) and self._tokenizer.is_longer(text, plan.max_model_len):
            return [Prompt(b"", max(plan.max_model_len, threshold) + 1)]
        return self._tokenize_all(plan)

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
        self.check_open()
        return made

    async def _plan_continued(
        self,
        request: ApiRequest,
        dialect: Dialect,
        body: bytes,
        info: RequestInfo,
        looking: Awaitable[LookedUp],
    ) -> tuple[RequestPlan, list[Prompt] | None]:
        """The plan of a request that continues earlier ones."""
        async with self._look_ups:
            found = await looking
            self.check_open()
            size = len(body) + found.size
            info = info._replace(turn=self.turns.go_on(info.tenant, found.conversation, size))
            return await self._plan_anywhere(request, size, dialect, body, info, found)

    def _work(
        self,
        request: ApiRequest,
        dialect: Dialect,
        plan: RequestPlan,
        hints: RoutingHints,
        prompts: list[Prompt],
    ) -> Work:
        """Check what depends on the prompts' lengths, and prepare the reply. Raises ApiError."""
        if plan.logprob_bytes or plan.prompt_logprobs >= 0:
            of_prompts = wide_prompt_logprob_bytes(
                plan.prompt_logprobs, sum(prompt.length for prompt in prompts)
            )
            self._reserve_logprobs(request, plan.logprob_bytes + of_prompts)
        if plan.n == 1 and len(prompts) == 1:
            samplings = [plan.sampling(prompts[0].length)]
        else:
            check_queue_capacity(self._config, plan, [prompt.length for prompt in prompts], hints.rank)
            samplings = [plan.sampling(prompt.length, index) for prompt in prompts for index in range(plan.n)]
        format = dialect.reply_format(plan, request.request_id)
        if plan.columns:
            format = ColumnsReply(format, plan)
        return Work(
            plan=plan,
            format=format,
            hints=hints,
            prompts=prompts,
            samplings=samplings,
            ids=(plan.request_id or request.request_id, format.id),
            trace=request.trace.sent if request.trace is not None and request.trace.sampled else "",
        )

    def _reserve_logprobs(self, request: ApiRequest, size: int) -> None:
        """Reserve ``size`` bytes until the request ends. Raises ApiError if others have reserved too much."""
        if size and self._logprob_bytes + size > MAX_LOGPROB_BYTES:
            raise overloaded(
                "The server is overloaded by logprobs: running requests may hold "
                f"{self._logprob_bytes >> 20} MiB of them, at most {MAX_LOGPROB_BYTES >> 20} MiB may be held."
            )
        request.logprob_bytes = size
        self._logprob_bytes += size

    def _stream(self, work: Work, request: ApiRequest) -> None:
        """Start a streamed reply. It is detached: no task waits for its end."""
        request.detached = True
        try:
            streamed = StreamedReply(
                self._context,
                work.plan,
                work.format,
                request.arrival,
                sink=request.http.sink,
                on_end=request.on_end,
            )
            request.reply = streamed
            self._report_load(request)
            request.http.forget_headers()
            request.http.sink.listen(streamed)
            self._submit(streamed, work)
        except BaseException:
            request.detached = False
            raise

    async def _collect(self, work: Work, request: ApiRequest) -> None:
        collected = CollectedReply(self._context, work.plan, work.format, request.arrival)
        request.reply = collected
        request.http.sink.listen(collected)
        self._submit(collected, work)
        request.http.sink.release()
        error = await collected.done
        if error is not None:
            raise stream_failed(error)
        if collected.left:
            raise ClientGone
        kept = work.format.keep(collected)
        if kept is not None:
            try:
                await kept
            except Exception:  # noqa: BLE001 - logged where it was raised
                raise stream_failed(NOT_KEPT) from None
        self._report_load(request)
        if isinstance(work.format, ColumnsReply):
            file = work.format.file(collected)
            await self._sender.send_sized(request, file.pieces(), SAFETENSORS, file.size)
        else:
            await self._sender.send_json(request, work.format.whole(collected))

    async def _run_in_background(self, work: Work, entry: StoredResponse, request: ApiRequest) -> None:
        """Start a reply that goes on without its client, and answer with its entry or with its events."""
        assert self._background is not None, "its dialect has a store"
        kept = request.logprob_bytes, request.pictures
        run = await self._background.begin(entry, work.format, lambda: self.end_one(*kept))
        self.begin_one()
        request.logprob_bytes, request.pictures = 0, ()
        streamed = StreamedReply(
            self._context, work.plan, work.format, request.arrival, sink=run, on_end=run.on_reply_end
        )
        run.listen(streamed)
        try:
            self.check_open()
            self._submit(streamed, work)
        except BaseException:
            run.abandon()
            raise
        run.write(work.format.queued())
        if work.plan.stream:
            store, silence_s = self._background.store, self._config.sse_keep_alive
            await follow(request, store, entry.id, entry.tenant, -1, silence_s)
        else:
            await request.http.reply_json(entry.body)

    def _report_load(self, request: ApiRequest) -> None:
        """Add the load of the engines to the reply's headers, if the request asks for it."""
        if FORMAT_HEADER in request.http.fields:
            request.add_headers(*load_report(request.http, self._engine_client.engines))

    def _submit(self, reply: StreamedReply | CollectedReply, work: Work) -> None:
        """Start all streams of a reply before any of their rows arrives.

        Raises ApiError if there is no engine; after any exception the reply has ended without sending
        anything, and none of its streams runs.
        """
        if reply.ended:  # the client disconnected while its prompt was tokenized
            return
        try:
            self._submit_all(reply, work)
        except BaseException:
            reply.refuse()
            raise
        self._engine_client.yield_to_pump()

    def _submit_all(self, reply: StreamedReply | CollectedReply, work: Work) -> None:
        plan = work.plan
        if plan.adapter is not None:
            plan.adapter = self._present_adapter(plan.adapter)
        if self._engine_client.full(work.hints, plan.adapter):
            raise overloaded(
                f"The engines are overloaded: requests of {MAX_QUEUED_BYTES >> 20} MiB wait for each of them."
            )
        interval = plan.interval
        adapter, digest = plan.adapter or (None, "")
        for number, sampling in enumerate(work.samplings):
            prompt = work.prompts[number // plan.n]
            like = prompt.routed or prompt.ids
            engine = self._engine_client.pick(work.hints, like, plan.cache_salt, plan.adapter)
            if engine is None:
                raise self.no_engine(work.hints.rank, plan.adapter)
            stream = reply.add(prompt, engine.rank)
            stream.pinned_rank = work.hints.rank
            written = isinstance(reply, StreamedReply)
            self._streams.open(stream, reply.arrival, sampling.max_tokens, written=written)
            request = Submit(
                stream=stream.handle,
                prompt=prompt.ids,
                sampling=sampling,
                interval=interval.tokens,
                interval_ms=interval.ms,
                priority=plan.priority,
                cache_salt=plan.cache_salt,
                adapter=adapter,
                adapter_digest=digest,
                kv_transfer_params=plan.kv_transfer_params,
                trace=work.trace,
                ids=(*work.ids, *work.format.choice_ids(number)),
                hints=plan.cache_hints(work.hints.session),
                media=prompt.media,
            )
            self._engine_client.submit(stream, request, prompt.known)
            prompt.known = None  # it holds the prompt of the turn before

    def _present_adapter(self, planned: AdapterKey) -> AdapterKey:
        """The adapter that has the name now: it may have been replaced or unloaded while the prompt was made
        into tokens. Raises ApiError."""
        adapter = self._engine_client.adapters.get(planned[0])
        if adapter is None:
            message = f"The adapter {planned[0]!r} was unloaded before this request could begin."
            raise ApiError(404, message, param="model", code="model_not_found")
        return adapter.key

    def no_engine(self, rank: int | None = None, adapter: AdapterKey | None = None) -> ApiError:
        """The error for a request of ``adapter`` that no engine takes, or not the one of ``rank``."""
        client = self._engine_client
        closed = client.refusal()
        if adapter is not None and not closed and client.accepts_streams(rank):
            where = "No engine" if rank is None else f"Engine {rank} (X-data-parallel-rank)"
            if not client.is_up_to_date():
                return unavailable(f"{where} has confirmed the adapter {adapter[0]!r} yet.", "no_engine")
            # 404, not 503: the engines serve everything else, and gateways would rest the whole server
            return ApiError(
                404,
                f"{where} has the adapter {adapter[0]!r}: its files could not be read again. "
                "GET /admin/adapters says why; load it again.",
                param="model",
                code="adapter_not_loaded",
            )
        if rank is None or not client.accepts_streams():
            return no_engine(closed)
        return unavailable(f"Engine {rank} (X-data-parallel-rank) takes no requests.", "no_engine")

    def routing_hints(self, http: HttpRequest, session: str | None = None) -> RoutingHints:
        """From the headers X-Session-ID, else ``session``, and X-data-parallel-rank. Raises ApiError."""
        if RANK_HEADER not in http.fields and SESSION_HEADER not in http.fields:
            return NO_HINTS if session is None else RoutingHints(session)
        pin = http.header(RANK_HEADER)
        session = http.header(SESSION_HEADER) or session
        if pin is None:
            return RoutingHints(session)
        ranks = len(self._engine_client.engines)
        # The length first: int() refuses more than 4,300 digits.
        if not (pin.isascii() and pin.isdecimal() and len(pin) <= MAX_RANK_DIGITS and int(pin) < ranks):
            shown = pin if len(pin) <= MAX_RANK_DIGITS else pin[:MAX_RANK_DIGITS] + "…"
            raise ApiError(
                400,
                f"X-data-parallel-rank is {shown!r}, there are engines 0 to {ranks - 1}.",
                param="X-data-parallel-rank",
            )
        return RoutingHints(session, int(pin))

    def check_open(self) -> None:
        if self.draining:
            raise unavailable("The server is shutting down.", "draining")
        if not self._engine_client.accepts_streams():
            raise self.no_engine()

    # -- prompts

    def _tokenize(self, plan: RequestPlan) -> list[Prompt] | None:
        """Token ids of all prompts; None if they are so long that a thread should make them."""
        most = self._tokenizer.inline_characters[plan.add_special_tokens]
        if _characters(plan) > most and self._unknown_characters(plan) > most:
            return None
        return self._tokenize_all(plan)

    def _unknown_characters(self, plan: RequestPlan) -> int:
        """What there is to tokenize besides what the turn before had."""
        prompt, turn = plan.prompts[0], plan.turn
        if turn is None or plan.echo or not isinstance(prompt, str):
            return _characters(plan)
        if len(prompt) > ESTIMATED_ABOVE * plan.max_model_len:  # it may be encoded twice
            return len(prompt)
        return self._encoder.unknown_characters(prompt, plan.add_special_tokens, turn)

    def _tokenize_all(self, plan: RequestPlan) -> list[Prompt]:
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


def _characters(plan: RequestPlan) -> int:
    """What there is to tokenize, and token ids to decode for an echo."""
    characters = 0
    for prompt in plan.prompts:
        if isinstance(prompt, str):
            characters += len(prompt)
        elif plan.echo:
            characters += len(prompt) // 4
    return characters


def _named_types(dialect: Dialect, request: ApiRequest) -> Headers:
    """The request's headers if they may ask for columns; the reply then says that it depends on them."""
    http = request.http
    if not dialect.columns or b"accept" not in http.fields:
        return ()
    if not any(name == b"accept" and SAFETENSORS in value.lower() for name, value in http.headers):
        return ()
    request.add_headers((b"vary", b"accept"))
    return http.headers
