"""The routes for vectors, scores and labels: from a request body to submitted streams and to the reply."""

from __future__ import annotations

from functools import partial

from penstock.api.api_request import ApiRequest, Handler
from penstock.api.generate import GenerationRoutes
from penstock.api.planning import INLINE_BODY
from penstock.api.time_sliced_sender import TimeSlicedSender
from penstock.config.serve import ServeConfig
from penstock.dialects.registry import make_pooling_dialects
from penstock.dispatch.connections import MAX_QUEUED_BYTES
from penstock.dispatch.engine_client import RoutingHints
from penstock.generation.dialect import RequestInfo
from penstock.generation.pooling.dialect import PoolingDialect
from penstock.generation.pooling.input_encoder import InputEncoder
from penstock.generation.pooling.plan import EncodedInputs, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.pooling.reply import PooledReply
from penstock.generation.replies.reply import RequestContext
from penstock.generation.replies.stream_failure import stream_failed
from penstock.http.admission import overloaded
from penstock.http.errors import refused
from penstock.http.request import ClientGone, beyond_option
from penstock.wire.messages import SamplingParams, Submit
from penstock.wire.pooling import PER_TOKEN, PoolingTask

COUNTED = b"x-compute-tokens"
"""TEI's header for the tokens of all inputs. Bodies of some APIs have no place for them."""
MAX_VECTOR_BYTES = 1 << 30
"""Bytes of the matrices of running requests."""
_MAIN_ROUTES = {PoolingTask.EMBED: "/v1/embeddings", PoolingTask.CLASSIFY: "/classify or /v1/rerank"}


class PoolingRoutes:
    """Runs the requests of all dialects."""

    def __init__(
        self,
        config: ServeConfig,
        generation: GenerationRoutes,
        context: RequestContext,
        processor: PoolingProcessor,
        encoder: InputEncoder,
    ) -> None:
        """``generation``: counts running requests, and refuses new ones of a server that ends."""
        self.dialects = make_pooling_dialects(config, processor)
        self._config = config
        self._generation = generation
        self._context = context
        self._processor = processor
        self._encoder = encoder
        self._inline = processor.inputs.tokenizer.inline_characters[False]
        self._sender = TimeSlicedSender(context.turns)
        self._held = 0
        """Bytes of matrices."""

    @property
    def main_routes(self) -> list[str]:
        """The routes that most clients use for what the model makes."""
        info = self._processor.info
        return [route for task, route in _MAIN_ROUTES.items() if info is not None and task in info.tasks]

    def handler(self, dialect: PoolingDialect) -> Handler:
        """The handler of the dialect's route."""
        return partial(self._run, dialect)

    async def _run(self, dialect: PoolingDialect, request: ApiRequest) -> None:
        generation = self._generation
        generation.begin_one()
        size = 0
        try:
            plan, inputs = await self._planned(dialect, request)
            hints = generation.routing_hints(request.http)
            width = self._width(plan)
            size = self._reserve(plan, inputs, width)
            reply = PooledReply(
                self._context,
                plan,
                inputs,
                width,
                id=plan.request_id or request.request_id,
                arrival=request.arrival,
            )
            request.reply = reply
            request.http.sink.listen(reply)
            self._submit(reply, hints, request)
            request.http.sink.release()
            error = await reply.done
            if error is not None:
                raise stream_failed(error)
            if reply.left:
                raise ClientGone
            pooled = reply.pooled()
            body = dialect.reply(plan, pooled, request.request_id)
            request.add_headers(*body.headers, (COUNTED, b"%d" % pooled.usage.prompt_tokens))
            if body.size is None:
                await self._sender.send_json(request, body.pieces)
            else:
                await self._sender.send_sized(request, body.pieces, body.kind, body.size)
        finally:
            self._held -= size
            generation.end_one(0)

    async def _planned(
        self, dialect: PoolingDialect, request: ApiRequest
    ) -> tuple[PoolingPlan, EncodedInputs]:
        """The checked request and its token ids; what takes long is done in a thread. Raises ApiError."""
        http, generation = request.http, self._generation
        body = await http.read_json(self._config.max_request_bytes, beyond_option)
        generation.check_open()
        asked = http.header(b"x-request-id")
        info = RequestInfo(asked, request.tenant, http.headers, path=http.path, target=http.target)
        if len(body) <= INLINE_BODY:
            plan = dialect.plan(body, info)
        else:
            plan = await generation.planner.in_thread(request, len(body), dialect.plan, body, info)
        del body
        cost = self._encoder.cost(plan)
        if cost <= self._inline:
            inputs = self._encoder.encode(plan)
        else:
            inputs = await generation.planner.in_thread(request, cost, self._encoder.encode, plan)
        plan.inputs = ()  # not kept while the engines compute
        return plan, inputs

    def _width(self, plan: PoolingPlan) -> int:
        info = self._processor.info
        assert info is not None  # the dialect has asked for its task
        if plan.task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED):
            return plan.dimensions or info.width
        return info.labels

    def _reserve(self, plan: PoolingPlan, inputs: EncodedInputs, width: int) -> int:
        """Reserve the bytes of the reply's matrix. Raises ApiError."""
        rows = len(inputs.ids) // 4 if plan.task in PER_TOKEN else len(inputs.lengths)
        size = 4 * rows * width
        if size > MAX_VECTOR_BYTES:
            raise refused(
                f"The reply would have {size >> 20} MiB of vectors, at most {MAX_VECTOR_BYTES >> 20} MiB are "
                f"allowed: send fewer inputs.",
                plan.field,
            )
        if self._held + size > MAX_VECTOR_BYTES:
            raise overloaded(
                f"The server is overloaded by vectors: running requests hold {self._held >> 20} MiB of them, "
                f"at most {MAX_VECTOR_BYTES >> 20} MiB may be held."
            )
        self._held += size
        return size

    def _submit(self, reply: PooledReply, hints: RoutingHints, request: ApiRequest) -> None:
        """Start all streams of a reply. Raises ApiError if there is no engine; then none of them runs."""
        if reply.ended:  # the client disconnected while its inputs were tokenized
            return
        try:
            self._submit_all(reply, hints, request)
        except BaseException:
            reply.refuse()
            raise
        self._context.engine_client.yield_to_pump()

    def _submit_all(self, reply: PooledReply, hints: RoutingHints, request: ApiRequest) -> None:
        client, plan = self._context.engine_client, reply.plan
        if client.full(hints):
            raise overloaded(
                f"The engines are overloaded: requests of {MAX_QUEUED_BYTES >> 20} MiB wait for each of them."
            )
        trace = request.trace.sent if request.trace is not None and request.trace.sampled else ""
        engines = 1 if hints.rank is not None else sum(engine.accepts_streams for engine in client.engines)
        for part in reply.parts(engines):
            engine = client.pick(hints)
            if engine is None:
                raise self._generation.no_engine(hints.rank)
            stream = reply.add(part, engine.rank)
            stream.pinned_rank = hints.rank
            self._context.streams.open(stream, reply.arrival, part.inputs, written=False)
            submit = Submit(
                stream=stream.handle,
                prompt=part.prompt,
                sampling=SamplingParams(max_tokens=part.inputs, seed=0),
                priority=plan.priority,
                trace=trace,
                ids=(reply.format.id,),
                pooling=part.params,
            )
            client.submit(stream, submit)
