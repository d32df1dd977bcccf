"""The generating routes: from a plan to submitted streams and to the end of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from penstock.api.api_request import ApiRequest, Handler
from penstock.api.background import BackgroundResponses
from penstock.api.byte_budget import ByteBudget
from penstock.api.event_follower import follow
from penstock.api.planning import RequestPlanner, characters
from penstock.api.queue_capacity import check_queue_capacity
from penstock.api.routes.load_report import FORMAT_HEADER, load_report
from penstock.api.time_sliced_sender import TimeSlicedSender
from penstock.config.serve import ServeConfig
from penstock.dispatch.connections import MAX_QUEUED_BYTES
from penstock.dispatch.engine_client import NO_HINTS, RoutingHints
from penstock.generation.compaction.planned import PlannedCompaction, Summary, SummaryText
from penstock.generation.dialect import Dialect, ReplyFormat, RequestInfo
from penstock.generation.grammars.checker import GrammarChecker
from penstock.generation.media.preparation import PicturePreparation, Pictures
from penstock.generation.plan import RequestPlan, constrain
from penstock.generation.prompt.prompt_encoder import PromptEncoder
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.columns import ColumnsReply
from penstock.generation.replies.reply import Prompt, RequestContext
from penstock.generation.replies.safetensors_writer import SAFETENSORS
from penstock.generation.replies.stream_failure import stream_failed
from penstock.generation.replies.streamed import NOT_KEPT, StreamedReply
from penstock.generation.request.validation import (
    MAX_LOGPROB_BYTES,
    wide_prompt_logprob_bytes,
)
from penstock.http.admission import no_engine, overloaded, unavailable
from penstock.http.errors import ApiError
from penstock.http.request import ClientGone, HttpRequest, beyond_option
from penstock.http.sink import Headers
from penstock.store.stored_response import StoredResponse
from penstock.wire.messages import AdapterKey, SamplingParams, Submit

RANK_HEADER, SESSION_HEADER = b"x-data-parallel-rank", b"x-session-id"
MAX_RANK_DIGITS = 20
"""Maximum digits of X-data-parallel-rank, leading zeros included."""


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
        self.planner = RequestPlanner(config, encoder, large, media, self.check_open)
        self._config = config
        self._background = background
        self._constrains = config.engine != "synthetic" or config.synthetic_script is not None
        """Whether the engines apply grammars."""
        self._context = context
        self._engine_client = context.engine_client
        self._streams = context.streams
        self._grammars = GrammarChecker()
        self._sender = TimeSlicedSender(context.turns)
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
            plan, prompts, info = await self.planner.planned(request, dialect, body, accept)
            del body  # not kept while the reply is generated
            if plan.answer is not None:
                await request.http.reply_json(plan.answer)
                return
            await self.planner.prepare_images(request, plan)
            if plan.compaction is not None:
                plan, prompts = await self._compacted(request, dialect, plan, prompts, info)
            del info  # nor is what was lifted out of it
            if plan.warning is not None:
                request.add_headers((b"warning", b'299 penstock "%b"' % plan.warning.encode()))
            if plan.constraint is not None and self._constrains:
                checked = self._grammars.check_grammar(plan.constraint, request.client)
                constrain(plan, await request.http.unless_gone(checked))
                self.check_open()
            elif plan.constraint is not None and plan.constraint.optional:
                constrain(plan, None)
            hints = self.routing_hints(request.http, plan.session)
            await self.planner.prepare_images(request, plan)
            if prompts is None:
                prompts = await self.planner.tokenized(request, plan)
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
        planner = self.planner
        compaction: PlannedCompaction = plan.compaction
        plan.compaction = None  # nor is it kept, with all that it refers to
        size = characters(plan)
        if prompts is None:
            prompts = await planner.in_thread(request, size, planner.lengths, plan, compaction.threshold)
        if prompts[0].length <= compaction.threshold:
            return plan, prompts
        planned = planner.salted(await planner.in_thread(request, size, compaction.summary_plan), info)
        planned.image_parts = plan.image_parts
        await planner.prepare_images(request, planned)
        asked = await planner.in_thread(request, characters(planned), planner.tokenize_all, planned)
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
        resumed = await planner.in_thread(request, size, compaction.resumed, Summary(text, collected.usage()))
        if resumed is None:
            return plan, prompts
        resumed.image_parts = plan.image_parts
        return planner.salted(resumed, info), None

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


def _named_types(dialect: Dialect, request: ApiRequest) -> Headers:
    """The request's headers if they may ask for columns; the reply then says that it depends on them."""
    http = request.http
    if not dialect.columns or b"accept" not in http.fields:
        return ()
    if not any(name == b"accept" and SAFETENSORS in value.lower() for name, value in http.headers):
        return ()
    request.add_headers((b"vary", b"accept"))
    return http.headers
