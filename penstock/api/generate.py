"""The generating routes: from a request body to submitted streams and to the end of the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

from penstock.api.exchange import Exchange, Handler
from penstock.config.serve import ServeConfig
from penstock.dispatch.engine_client import RoutingHints
from penstock.generation.collected import CollectedReply
from penstock.generation.dialect import Dialect, ReplyFormat
from penstock.generation.plan import RequestPlan
from penstock.generation.replies import Prompt, RequestContext
from penstock.generation.streamed import StreamedReply
from penstock.generation.structured_output import GrammarChecker
from penstock.generation.tokenizer import Tokenizer
from penstock.http.admission import no_engine, stream_failed, unavailable
from penstock.http.asgi import ClientGone, read_body, request_header, send_json
from penstock.http.errors import ApiError
from penstock.http.sink import Scope
from penstock.wire.messages import SamplingParams, Submit

INLINE_BODY = 256 * 1024
"""Largest body in bytes that is planned on the event loop, which takes at most 5 ms (measured: 20 ns a byte
for short messages); larger ones are planned in a thread."""


class Work(NamedTuple):
    """A checked and tokenized request."""

    plan: RequestPlan
    format: ReplyFormat
    hints: RoutingHints
    prompts: list[Prompt]
    samplings: list[SamplingParams]
    """One per choice of each prompt."""


class GenerationRoutes:
    """Runs the requests of all dialects."""

    def __init__(self, config: ServeConfig, tokenizer: Tokenizer, context: RequestContext) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._context = context
        self._engine_client = context.engine_client
        self._streams = context.streams
        self._grammars = GrammarChecker()
        self.draining = False
        self._running = 0
        self._idle = asyncio.Event()
        """Set while no request runs."""
        self._idle.set()

    def handler(self, dialect: Dialect) -> Handler:
        """The handler of the dialect's route."""

        def handle(exchange: Exchange) -> Awaitable[None]:
            return self._count(exchange, dialect)

        return handle

    async def drain(self) -> None:
        """Refuse new requests and wait for the end of running ones."""
        self.draining = True
        await self._idle.wait()

    async def _count(self, exchange: Exchange, dialect: Dialect) -> None:
        self._running += 1
        self._idle.clear()
        try:
            await self._run(exchange, dialect)
        finally:
            if not exchange.detached:
                self.on_request_end()

    def on_request_end(self) -> None:
        """A request has ended; called from outside if its reply is detached."""
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def _run(self, exchange: Exchange, dialect: Dialect) -> None:
        scope = exchange.scope
        body = await read_body(scope, exchange.receive, self._config.max_request_bytes)
        self._check_open()
        request_id = request_header(scope, b"x-request-id")
        if len(body) <= INLINE_BODY:
            plan = dialect.plan(body, request_id)
        else:
            plan = await asyncio.to_thread(dialect.plan, body, request_id)
            self._check_open()
        del body  # not kept while the reply is generated
        if plan.constraint is not None:
            await self._grammars.check(plan.constraint)
            self._check_open()
        hints = self._routing_hints(scope)
        prompts = self._tokenize(plan)
        if prompts is None:
            prompts = await asyncio.to_thread(self._tokenize_all, plan)
            self._check_open()
        samplings = [plan.sampling(prompt.length, index) for prompt in prompts for index in range(plan.n)]
        format = dialect.reply_format(plan, exchange.request_id)
        work = Work(plan=plan, format=format, hints=hints, prompts=prompts, samplings=samplings)
        if plan.stream:
            self._stream(work, exchange)
        else:
            await self._collect(work, exchange)

    def _stream(self, work: Work, exchange: Exchange) -> None:
        """Start a streamed reply. It is detached: no task waits for its end."""
        exchange.detached = True
        try:
            streamed = StreamedReply(
                self._context,
                work.plan,
                work.format,
                exchange.arrival,
                sink=exchange.sink,
                on_end=exchange.on_end,
            )
            exchange.reply = streamed
            exchange.sink.listen(streamed, exchange.headers)
            self._submit(streamed, work)
        except BaseException:
            exchange.detached = False
            raise

    async def _collect(self, work: Work, exchange: Exchange) -> None:
        collected = CollectedReply(self._context, work.plan, work.format, exchange.arrival)
        exchange.reply = collected
        exchange.sink.listen(collected)
        self._submit(collected, work)
        exchange.sink.release()
        error = await collected.done
        if error is not None:
            raise stream_failed(error)
        if collected.left:
            raise ClientGone
        await send_json(exchange.send, work.format.whole(collected))

    def _submit(self, reply: StreamedReply | CollectedReply, work: Work) -> None:
        """Start all streams of a reply before any of their rows arrives.

        Raises ApiError if there is no engine; the reply has then ended without sending anything.
        """
        if reply.ended:  # the client disconnected while its prompt was tokenized
            return
        plan = work.plan
        interval = plan.interval
        for number, sampling in enumerate(work.samplings):
            prompt = work.prompts[number // plan.n]
            engine = self._engine_client.pick(work.hints, prompt.ids, plan.cache_salt)
            if engine is None:
                reply.refuse()
                raise no_engine(sleeping=self._engine_client.sleeps())
            stream = reply.add(prompt, engine.rank)
            self._streams.open(stream, reply.arrival)
            request = Submit(
                stream=stream.handle,
                prompt=prompt.ids,
                sampling=sampling,
                interval=interval.tokens,
                interval_ms=interval.ms,
                priority=plan.priority,
                cache_salt=plan.cache_salt,
                adapter=plan.adapter,
                kv_transfer_params=plan.kv_transfer_params,
            )
            self._engine_client.submit(stream, request)
        self._engine_client.yield_to_pump()

    def _routing_hints(self, scope: Scope) -> RoutingHints:
        """From the headers X-Session-ID and X-data-parallel-rank. Raises ApiError."""
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
        """Token ids of all prompts; None if they are so long that a thread should tokenize them."""
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
