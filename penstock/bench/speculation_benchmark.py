"""``penstock bench speculation``: output tokens per second with speculative decoding, and without.

Two torch engines run here by turns on the same requests, so that a change of the machine's load meets both. A
turn's time is CPU time of the process where the model runs on a CPU, and elapsed time elsewhere. Both engines
must give the same tokens: the report counts those that differ.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import penstock
from penstock.bench.deadline import ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.machine import Machine, this_machine
from penstock.bench.tables import format_table
from penstock.config.bench import BenchSpeculationConfig
from penstock.config.serve import ServeConfig
from penstock.distribution import pip_install
from penstock.engine.base import RequestRejected
from penstock.wire.messages import SamplingParams, Submit

if TYPE_CHECKING:
    from penstock.engine.torch.engine import TorchEngine

DEMO_DIR = Path(penstock.__file__).parent / "demo"
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""ChatML, the most common chat format, and the demo model's."""
END_OF_TURN = "<|im_end|>\n"
QUESTIONS = "What does enumerate do?", "Who are you?", "Explain the with statement.", "What is asyncio?"
DOCUMENT = "# Penstock\n\nPenstock serves language models over HTTP. An API server"
SCHEMA = {
    "type": "array",
    "minItems": 6,
    "items": {
        "type": "object",
        "properties": {
            "identifier": {"type": "integer", "minimum": 0, "maximum": 9999},
            "description": {"enum": ["a first choice", "a first option", "something else"]},
            "available": {"type": "boolean"},
        },
        "required": ["identifier", "description", "available"],
        "additionalProperties": False,
    },
}


class SpeculationRun(msgspec.Struct, frozen=True, kw_only=True):
    """One workload at one number of streams."""

    workload: str
    streams: int
    plain_tokens_per_s: float
    """Medians over the rounds."""
    tokens_per_s: float
    ratio: float
    """Median of the rounds' ratios; ``least`` and ``most`` are their extremes."""
    least: float
    most: float
    drafted: int
    accepted: int
    tokens_per_step: float
    """Tokens per step of a stream that decodes, with speculation."""
    different_streams: int
    """Streams whose tokens differ from those without speculation, in the last round."""


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True):
    """All runs."""

    method: str
    speculative_tokens: int | str
    device: str
    dtype: str
    runs: list[SpeculationRun]
    machine: Machine


def render(report: SpeculationReport) -> str:
    """The report as a table."""
    header = (
        "workload",
        "streams",
        "without",
        "with",
        "ratio",
        "least",
        "most",
        "accepted",
        "per step",
        "differ",
    )
    rows = [
        (
            run.workload,
            str(run.streams),
            f"{run.plain_tokens_per_s:,.0f}/s",
            f"{run.tokens_per_s:,.0f}/s",
            f"{run.ratio:.2f}",
            f"{run.least:.2f}",
            f"{run.most:.2f}",
            f"{run.accepted}/{run.drafted}",
            f"{run.tokens_per_step:.2f}",
            str(run.different_streams),
        )
        for run in report.runs
    ]
    second = "CPU second" if report.device == "cpu" else "second"
    title = (
        f"--speculative-method {report.method} --speculative-tokens {report.speculative_tokens}, "
        f"{report.device}, {report.dtype}; output tokens per {second}, medians"
    )
    return "\n".join([title, "", *format_table([header, *rows]), "", str(report.machine)])


def measure(config: BenchSpeculationConfig, say: ProgressCallback) -> SpeculationReport:
    """Run all measurements; ``say`` gets a line before each. Raises BenchError, and ConfigError for a model
    that the engine does not run."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        raise BenchError(f"the torch engine is not installed: {pip_install('torch')}")
    model = config.model or str(DEMO_DIR)
    tokenizer = Path(model) / "tokenizer.json"
    if not tokenizer.is_file():
        raise BenchError(f"--model {model}: there is no tokenizer.json in such a directory")
    if config.draft_model is not None and not Path(config.draft_model, "config.json").is_file():
        raise BenchError(f"--draft-model {config.draft_model}: there is no config.json in such a directory")
    requests = _Requests(config, tokenizer)
    plain, drafting = _engine(config, model, "none"), _engine(config, model, config.method)
    if config.tokens >= plain.info.max_model_len:
        raise BenchError(
            f"--tokens {config.tokens}: the model takes {plain.info.max_model_len} tokens in all"
        )
    if "repeat" in config.workloads:
        requests.answer(plain)
    runs = []
    for workload in config.workloads:
        for streams in config.streams:
            say(f"{workload}, {streams} streams: {config.rounds} rounds of {config.tokens} tokens")
            runs.append(_measure(config, requests, plain, drafting, workload, streams))
    return SpeculationReport(
        method=config.method,
        speculative_tokens=config.speculative_tokens,
        device=plain.info.device,
        dtype=plain.info.dtype,
        runs=runs,
        machine=this_machine(),
    )


def _engine(config: BenchSpeculationConfig, model: str, method: str) -> TorchEngine:
    from penstock.engine.torch.engine import TorchEngine

    speculative: dict[str, Any] = {}
    if method != "none":
        speculative = {"speculative_method": method, "speculative_tokens": config.speculative_tokens}
    if method == "draft":
        speculative["draft_model"] = config.draft_model
    options = ServeConfig(
        dtype=config.dtype, max_num_seqs=max(config.streams), threads=config.threads, **speculative
    )
    draft = config.draft_model if method == "draft" else None
    return TorchEngine(options, model, lambda text, fraction: None, draft_dir=draft)


class _Requests:
    """Prompts and sampling parameters of the workloads."""

    def __init__(self, config: BenchSpeculationConfig, tokenizer: Path) -> None:
        from llguidance import LLMatcher
        from tokenizers import Tokenizer

        known = Tokenizer.from_file(str(tokenizer))
        self._vocab_size = known.get_vocab_size()
        self._tokens = config.tokens
        self._grammar = LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False})
        self._prompts = {
            name: known.encode(text).ids
            for name, text in (("document", DOCUMENT), ("schema", "A list of products: "))
        }
        self._questions = [known.encode(TURN.format(question)).ids for question in QUESTIONS]
        self._end_of_turn = known.encode(END_OF_TURN, add_special_tokens=False).ids
        self._again: list[list[int]] = []
        """Prompts in which the last question has been answered before."""
        self._streams = count()

    def answer(self, engine: TorchEngine) -> None:
        """Have the engine answer the questions, each of which is asked again by the workload ``repeat``."""
        load = _Load(engine, iter([self._request(prompt, 0, "repeat") for prompt in self._questions]))
        load.start(len(self._questions))
        while engine.has_work():
            load.step()
        for question, answer in zip(self._questions, load.outputs(), strict=True):
            self._again.append([*question, *answer, *self._end_of_turn, *question])

    def of(self, workload: str, round_number: int) -> Iterator[Submit]:
        """Requests without end, others in each round, as ``suffix`` would remember them; those of ``repeat``
        are a few questions."""
        for number in count(round_number << 32):
            yield self._one(workload, number)

    def _one(self, workload: str, number: int) -> Submit:
        random = np.random.default_rng(number)
        drawn = random.integers(5, self._vocab_size, 100).tolist()
        match workload:
            case "random":
                prompt = drawn
            case "repeat":
                prompt = self._again[number % len(self._again)]
            case _:
                prompt = [*drawn[:1], *self._prompts[workload]]
        return self._request(prompt, number, workload)

    def _request(self, prompt: list[int], number: int, workload: str) -> Submit:
        sampling = SamplingParams(
            self._tokens,
            number,
            temperature=2.0 if workload == "random" else 0.7 if workload == "schema" else 0.0,
            ignore_eos=workload in ("document", "random"),
            grammar=self._grammar if workload == "schema" else None,
        )
        return Submit(next(self._streams), np.array(prompt, "<i4").tobytes(), sampling)


def _measure(
    config: BenchSpeculationConfig,
    requests: _Requests,
    plain: TorchEngine,
    drafting: TorchEngine,
    workload: str,
    streams: int,
) -> SpeculationRun:
    clock = time.process_time if plain.info.device == "cpu" else time.perf_counter
    speeds: list[tuple[float, float]] = []
    total = config.tokens * streams
    for round_number in range(config.rounds + 1):
        plain_speed, expected = _turn(plain, requests.of(workload, round_number), streams, total, clock)
        before = drafting.metrics()
        speed, found = _turn(drafting, requests.of(workload, round_number), streams, total, clock)
        if round_number:  # in the first one libraries choose their kernels
            speeds.append((plain_speed, speed))
    after = drafting.metrics()
    drafted, accepted = (
        int(after[name] - before[name])
        for name in (
            "spec_decode_draft_tokens_total",
            "spec_decode_accepted_tokens_total",
        )
    )
    ratios = [speed / plain_speed for plain_speed, speed in speeds]
    tokens = sum(map(len, found))
    return SpeculationRun(
        workload=workload,
        streams=streams,
        plain_tokens_per_s=statistics.median(each for each, _ in speeds),
        tokens_per_s=statistics.median(each for _, each in speeds),
        ratio=statistics.median(ratios),
        least=min(ratios),
        most=max(ratios),
        drafted=drafted,
        accepted=accepted,
        tokens_per_step=tokens / max(1, tokens - accepted),
        different_streams=sum(_differ(one, other) for one, other in zip(expected, found, strict=False)),
    )


def _turn(
    engine: TorchEngine, requests: Iterator[Submit], streams: int, tokens: int, clock: Callable[[], float]
) -> tuple[float, list[list[int]]]:
    """Output tokens per second of ``streams`` streams at a time, over the next ``tokens`` tokens after each
    one's first; and the tokens of each stream, of which the last ones are not whole. Raises BenchError."""
    load = _Load(engine, requests)
    load.start(streams)
    while not all(load.outputs()):
        load.step()
    load.start(streams - engine.load().running)
    known = load.tokens
    began = clock()
    while load.tokens - known < tokens:
        load.start(load.step())
    seconds = clock() - began
    made = load.tokens - known
    load.end()
    return made / seconds, load.outputs()


class _Load:
    """Requests at an engine, and their outputs."""

    def __init__(self, engine: TorchEngine, requests: Iterator[Submit]) -> None:
        self._engine = engine
        self._requests = requests
        self._output: dict[int, list[int]] = {}
        self.tokens = 0

    def outputs(self) -> list[list[int]]:
        """The tokens of each stream, in the order of their requests."""
        return list(self._output.values())

    def start(self, streams: int) -> None:
        """Submit as many requests. Raises BenchError for one that the model cannot run."""
        for request in islice(self._requests, streams):
            self._output[request.stream] = []
            try:
                self._engine.submit(0, request)
            except RequestRejected as error:
                raise BenchError(f"the model cannot run a request of the workload: {error}") from None

    def step(self) -> int:
        """One step. Returns how many streams it ended. Raises BenchError when one failed."""
        rows = self._engine.step()
        if rows.failed:
            raise BenchError(f"a stream failed: {rows.failed[0].message}")
        ends = np.arange(1, len(rows.stream) + 1) if rows.count is None else np.cumsum(rows.count)
        tokens, start = rows.tokens.tolist(), 0
        for stream, end in zip(rows.stream.tolist(), ends.tolist(), strict=True):
            self._output[stream] += tokens[start:end]
            start = end
        self.tokens += len(tokens)
        return 0 if rows.finish is None else int(np.count_nonzero(rows.finish))

    def end(self) -> None:
        """Abort the streams that are left."""
        self._engine.abort(0, list(self._output))
        while self._engine.has_work():
            self._engine.step()


def _differ(one: list[int], other: list[int]) -> bool:
    """Whether two outputs, of which one may have been cut earlier, are not the same."""
    common = min(len(one), len(other))
    return one[:common] != other[:common]
