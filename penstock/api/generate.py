"""The two generating endpoints: from a request body to streams, and to the end of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from penstock.api.exchange import EXCHANGE, Exchange
from penstock.config.options import ServeConfig
from penstock.dialects.input_processor import InputProcessor
from penstock.dialects.response_bodies import collected_body
from penstock.dispatch.engine_client import EngineClient, RoutingHints
from penstock.generation.collected import CollectedReply
from penstock.generation.events import EventShape
from penstock.generation.plan import RequestPlan
from penstock.generation.replies import Prompt, RequestContext
from penstock.generation.streamed import StreamedReply
from penstock.generation.structured_output import GrammarChecker
from penstock.generation.tokenizer import Tokenizer
from penstock.http.admission import no_engine, stream_failed, unavailable
from penstock.http.asgi import ClientGone, read_body, request_header, send_json
from penstock.http.errors import ApiError
from penstock.http.sink import EXTENSION, AsgiSink, Receive, Scope, Send, Sink
from penstock.streaming.stream import StreamError
from penstock.streaming.table import StreamTable
from penstock.wire.messages import Sampling, Submit

INLINE_BODY = 256 * 1024
"""Bytes of a body that is planned on the event loop, in 5 ms at most (20 ns a byte where messages are short,
measured); a larger one is planned in a thread."""

MakePlan = Callable[[bytes, str | None], RequestPlan]


class Work(NamedTuple):
    """A request that is ready to be started."""

    plan: RequestPlan
    hints: RoutingHints
    prompts: list[Prompt]
    samplings: list[Sampling]
    """For every choice of every prompt."""


class GenerationRoutes:
    """Runs requests of /v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        config: ServeConfig,
        input_processor: InputProcessor,
        tokenizer: Tokenizer,
        engine_client: EngineClient,
        streams: StreamTable,
        context: RequestContext,
    ) -> None:
        self._config = config
        self._input_processor = input_processor
        self._tokenizer = tokenizer
        self._engine_client = engine_client
        self._streams = streams
        self._context = context
        self._grammars = GrammarChecker()
        self.draining = False
        self._running = 0
        self._quiet = asyncio.Event()
        """No request runs."""
        self._quiet.set()

    def completion(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._count(scope, receive, self._input_processor.completion)

    def chat(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._count(scope, receive, self._input_processor.chat)

    async def drain(self) -> None:
        """Refuse new requests; returns when those that run have ended."""
        self.draining = True
        await self._quiet.wait()

    async def _count(self, scope: Scope, receive: Receive, make_plan: MakePlan) -> None:
        exchange: Exchange = scope[EXCHANGE]
        self._running += 1
        self._quiet.clear()
        try:
            await self._run(scope, receive, exchange, make_plan)
        finally:
            if not exchange.goes_on:
                self.leave()

    def leave(self) -> None:
        """A request has ended; called here unless its reply goes on."""
        self._running -= 1
        if not self._running:
            self._quiet.set()

    async def _run(self, scope: Scope, receive: Receive, exchange: Exchange, make_plan: MakePlan) -> None:
        body = await read_body(scope, receive, self._config.max_request_bytes)
        self._check_open()
        request_id = request_header(scope, b"x-request-id")
        if len(body) <= INLINE_BODY:
            plan = make_plan(body, request_id)
        else:
            plan = await asyncio.to_thread(make_plan, body, request_id)
            self._check_open()
        if plan.constraint is not None:
            await self._grammars.check(plan.constraint)
            self._check_open()
        hints = self._routing_hints(scope)
        prompts = self._tokenize(plan)
        if prompts is None:
            prompts = await asyncio.to_thread(self._tokenize_all, plan)
            self._check_open()
        samplings = [plan.sampling(prompt.length, index) for prompt in prompts for index in range(plan.n)]
        work = Work(plan, hints, prompts, samplings)
        extensions = scope.get("extensions") or {}
        sink: Sink | None = extensions.get(EXTENSION)
        if sink is None:
            await self._reply_portably(work, exchange, receive)
        elif plan.stream:
            self._leave_to(sink, work, exchange)
        else:
            await self._collect(work, exchange, sink)

    def _leave_to(self, sink: Sink, work: Work, exchange: Exchange) -> None:
        """Start a streamed reply that goes on by itself: no task waits for its end."""
        exchange.goes_on = True
        try:
            self._stream(work, exchange, sink, exchange.over)
        except BaseException:
            exchange.goes_on = False
            raise

    async def _reply_portably(self, work: Work, exchange: Exchange, receive: Receive) -> None:
        """Over a server that offers no sink."""
        sink = AsgiSink(receive, exchange.send)
        runner = asyncio.ensure_future(sink.run())
        try:
            if work.plan.stream:
                over: asyncio.Future[StreamError | None] = asyncio.get_running_loop().create_future()
                self._stream(work, exchange, sink, partial(_resolve, over))
                error = await over
                if error is not None:
                    raise stream_failed(error)
            else:
                await self._collect(work, exchange, sink)
        finally:
            sink.cut_unless_finished()
            await runner

    def _stream(
        self, work: Work, exchange: Exchange, sink: Sink, on_over: Callable[[StreamError | None], None]
    ) -> None:
        shape = _shape(work.plan, exchange)
        streamed = StreamedReply(self._context, work.plan, shape, exchange.arrival, sink, on_over)
        exchange.reply = streamed
        sink.listen(streamed)
        self._submit(streamed, work)

    async def _collect(self, work: Work, exchange: Exchange, sink: Sink) -> None:
        shape = _shape(work.plan, exchange)
        collected = CollectedReply(self._context, work.plan, shape, exchange.arrival)
        exchange.reply = collected
        sink.listen(collected)
        self._submit(collected, work)
        error = await collected.done
        if error is not None:
            raise stream_failed(error)
        if collected.left:
            raise ClientGone
        await send_json(exchange.send, collected_body(collected))

    def _submit(self, reply: StreamedReply | CollectedReply, work: Work) -> None:
        """Start all streams of a reply before any of their rows is delivered.

        Raises ApiError when there is no engine; then the reply has ended without a word.
        """
        if reply.ended:  # the client left while its prompt was tokenized
            return
        plan = work.plan
        interval = plan.interval
        for number, sampling in enumerate(work.samplings):
            prompt = work.prompts[number // plan.n]
            engine = self._engine_client.pick(work.hints, prompt.ids, plan.cache_salt)
            if engine is None:
                reply.drop_streams()
                reply.ended = True
                raise no_engine(sleeping=self._engine_client.sleeps())
            stream = reply.add(prompt, engine.rank)
            self._streams.open(stream, reply.arrival)
            request = Submit(
                stream.handle,
                prompt.ids,
                sampling,
                interval.tokens,
                plan.priority,
                plan.cache_salt,
                interval_ms=interval.ms,
                adapter=plan.adapter,
                kv_transfer_params=plan.kv_transfer_params,
            )
            self._engine_client.submit(stream, request)
        self._engine_client.yield_to_pump()

    def _routing_hints(self, scope: Scope) -> RoutingHints:
        """Of the headers X-Session-ID and X-data-parallel-rank. Raises ApiError."""
        pin = request_header(scope, b"x-data-parallel-rank")
        ranks = len(self._engine_client.engines)
        if pin is not None and not (pin.isdecimal() and int(pin) < ranks):
            raise ApiError(
                400, f"X-data-parallel-rank is {pin!r}, there are engines 0 to {ranks - 1}.", param=None
            )
        return RoutingHints(request_header(scope, b"x-session-id"), None if pin is None else int(pin))

    def _check_open(self) -> None:
        if self.draining:
            raise unavailable("The server is shutting down.", "draining")
        if not self._engine_client.accepts_streams():
            raise no_engine(sleeping=self._engine_client.sleeps())

    # -- prompts

    def _tokenize(self, plan: RequestPlan) -> list[Prompt] | None:
        """None: so long that a thread is to do it, while the event loop goes on."""
        most = self._tokenizer.inline_characters(plan.add_special_tokens)
        if sum(len(prompt) for prompt in plan.prompts if isinstance(prompt, str)) > most:
            return None
        return self._tokenize_all(plan)

    def _tokenize_all(self, plan: RequestPlan) -> list[Prompt]:
        return [self._prompt(plan, prompt) for prompt in plan.prompts]

    def _prompt(self, plan: RequestPlan, prompt: str | list[int]) -> Prompt:
        if isinstance(prompt, str):
            ids, length = self._tokenizer.encode_bytes(prompt, plan.add_special_tokens)
            echo = prompt if plan.echo else plan.echo_text
        else:
            ids, length = self._tokenizer.pack(prompt)
            echo = self._tokenizer.decode(prompt) if plan.echo else ""
        if plan.truncate_prompt_tokens is not None:
            ids = plan.truncate(ids)
            length = len(ids) // 4
        return Prompt(ids, length, echo)


def _shape(plan: RequestPlan, exchange: Exchange) -> EventShape:
    reply_id = f"{'chatcmpl' if plan.chat else 'cmpl'}-{plan.request_id or exchange.request_id}"
    return EventShape(chat=plan.chat, request_id=reply_id, model=plan.model, role=plan.role)


def _resolve(over: asyncio.Future[StreamError | None], error: StreamError | None) -> None:
    if not over.done():  # nobody may wait any longer: a server that stops cancels its tasks
        over.set_result(error)
