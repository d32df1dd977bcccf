"""Speculative decoding gives every stream what it gets without: tokens, ends and logprobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from penstock.config.errors import ConfigError
from penstock.engine.speculation.speculation import Speculation
from penstock.engine.torch.engine import TorchEngine
from penstock.wire.arrays import I32
from penstock.wire.frames import FinishReason
from penstock.wire.messages import Submit
from tests.engine.support import byte_level_tokenizer
from tests.engine.torch.harness import (
    DEVICE,
    VOCAB,
    Driver,
    Outcome,
    assert_alike,
    make_engine,
    make_model,
    run_all,
    submit,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99},
        "description": {"enum": ["a_first_choice", "a_first_option"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "maxItems": 2},
    },
    "required": ["identifier", "description", "tags"],
    "additionalProperties": False,
}
GRAMMARS = [
    LLMatcher.grammar_from_json_schema(SCHEMA, overrides={"whitespace_flexible": False}),
    LLMatcher.grammar_from_regex(r"[a-f]{3}-[0-9]{2,4}"),
    LLMatcher.grammar_from_regex(r"(abc|abd)(abc)*"),
    LLMatcher.grammar_from_lark('start: "yes,that_is_it" | "no,it_is_not" | "maybe"'),
]
FEW_BLOCKS = 10
"""In the place of bytes: so many blocks that streams are preempted."""
TOKEN_BYTES = {"llama": 256, "gemma2": 512}
MIXES = 24
"""Of sampling parameters, for each method and family; 500 with ``--slow``."""
FAMILIES = ("llama", "gemma2")
METHODS = ("ngram", "suffix", "draft", "oracle")
ENGINE: dict[str, Any] = {
    "max_num_seqs": 24,
    "max_num_batched_tokens": 256,
    "batch_invariant": DEVICE.type == "cpu",
}
"""What is compared does not depend on how many positions are computed together: in float32 about one token in
20,000 would."""


class Oracle:
    """Proposes what the streams get without speculation, with some wrong tokens."""

    def __init__(self, engine: TorchEngine, known: dict[int, list[int]], errors: float) -> None:
        self.table = engine._table
        self.known = known
        self.errors = errors
        self.random = np.random.default_rng(5)

    def begin(self, slot: int, scope: int = 0) -> None: ...

    def restart(self, slot: int) -> None: ...

    def reset(self) -> None: ...

    def end(self, slot: int) -> None: ...

    def propose(self, slots: np.ndarray, most: I32) -> I32:
        counts = np.zeros(len(slots), np.int32)
        for row, slot in enumerate(slots.tolist()):
            length = int(self.table.length[slot])
            done = length - int(self.table.base[slot])
            draft = self.known[int(self.table.stream[slot])][done : done + int(most[row])]
            draft = [
                int(self.random.integers(VOCAB)) if self.random.random() < self.errors else token
                for token in draft
            ]
            self.table.history[slot, length : length + len(draft)] = draft
            counts[row] = len(draft)
        return counts


def mixes(count: int, seed: int = 11) -> list[Submit]:
    """Requests with random sampling parameters, grammars and stops."""
    random = np.random.default_rng(seed)

    def maybe(chance: float, value: Callable[[], Any], otherwise: Any = None) -> Any:
        return value() if random.random() < chance else otherwise

    def tokens(most: int, high: int = VOCAB) -> tuple[int, ...]:
        return tuple(random.integers(3, high, size=random.integers(1, most + 1)).tolist())

    made = []
    for stream in range(count):
        few = tuple(random.integers(3, VOCAB, size=4).tolist())
        bias, banned = dict.fromkeys(few, 8.0), tuple({few[:1], few[1:3], tokens(3)})
        pattern = random.integers(3, VOCAB, size=random.integers(1, 9)).tolist()
        prompt = (pattern * 40)[: random.integers(1, 90)]
        sampling: dict[str, Any] = {
            "max_tokens": int(random.integers(1, 48)),
            "temperature": float(random.choice([0, 0, 0.7, 1.0, 1.5])),
            "top_p": maybe(0.3, lambda: 0.8, 1.0),
            "top_k": maybe(0.3, lambda: int(random.integers(1, 40)), 0),
            "min_p": maybe(0.2, lambda: 0.05, 0.0),
            "repetition_penalty": maybe(0.25, lambda: float(random.choice([0.8, 1.2, 1.6])), 1.0),
            "presence_penalty": maybe(0.2, lambda: float(random.choice([-1.5, 1.0])), 0.0),
            "frequency_penalty": maybe(0.2, lambda: float(random.choice([-0.5, 0.7])), 0.0),
            "min_tokens": maybe(0.3, lambda: int(random.integers(1, 12)), 0),
            "ignore_eos": bool(random.random() < 0.2),
            "stop_token_ids": maybe(0.3, lambda: tokens(60), ()),
            "logprobs": maybe(0.3, lambda: int(random.choice([0, 2, 150])), -1),
            "prompt_logprobs": maybe(0.1, lambda: 1, -1),
            "logit_bias": maybe(0.5, lambda bias=bias: bias),
            "allowed_token_ids": maybe(0.15, lambda few=few: (*few, 1)),
            "bad_words": maybe(0.3, lambda banned=banned: banned, ()),
            "grammar": maybe(0.3, lambda: str(random.choice(GRAMMARS))),
        }
        if sampling["grammar"] is not None:
            sampling |= {"allowed_token_ids": None, "bad_words": (), "logit_bias": None}
        made.append(submit(stream, prompt, interval=int(random.choice([1, 1, 3, 10])), **sampling))
    return made


def resumed(request: Submit, done: Sequence[int]) -> Submit:
    """The request as another engine resumes it after ``done``."""
    prompt = request.prompt + np.array(done, "<i4").tobytes()
    return Submit(request.stream, prompt, request.sampling, interval=request.interval, resumed=len(done))


class Family:
    """A random model, a smaller one of the same kind, and what requests get without speculation."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.target, self.draft = directory / "target", directory / "draft"
        make_model(kind, self.target)
        make_model(kind, self.draft, num_hidden_layers=1)
        for each in (self.target, self.draft):
            byte_level_tokenizer("tr", "no", "ye", "yes", "ab", "abc", "ch", "cho").save(
                str(each / "tokenizer.json")
            )
        self._token_bytes = TOKEN_BYTES[kind]
        self._plain: dict[int, dict[int, Outcome]] = {}

    def engine(self, method: str, known: dict[int, list[int]] | None = None, **options: Any) -> TorchEngine:
        options = ENGINE | options
        if options.get("kv_cache_memory") == FEW_BLOCKS:
            models = 1.5 if method == "draft" else 1
            options["kv_cache_memory"] = int((FEW_BLOCKS + 1) * 16 * self._token_bytes * models)
        if method == "oracle":
            options.pop("speculative_tokens", None)
            engine = make_engine(self.target, **options)
            oracle = Oracle(engine, known or {}, errors=0.15)
            engine._scheduler.streams.speculation = Speculation(engine._table, engine._sampling, oracle, 6)
            return engine
        if method == "draft":
            options |= {"draft_model": str(self.draft), "draft_dir": str(self.draft)}
        return make_engine(self.target, speculative_method=method, **options)

    def plain(self, count: int) -> dict[int, Outcome]:
        if count not in self._plain:
            self._plain[count] = run_all(make_engine(self.target, **ENGINE), mixes(count))
        return self._plain[count]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def assert_same(plain: Outcome, drafted: Outcome) -> None:
    assert not plain.error
    assert (plain.tokens, plain.finish, "", plain.prompt.keys()) == (
        drafted.tokens,
        drafted.finish,
        drafted.error,
        drafted.prompt.keys(),
    )
    assert len(plain.logprobs) == len(drafted.logprobs)
    for (ids, values, rank), (other_ids, other_values, other_rank) in zip(
        plain.logprobs, drafted.logprobs, strict=True
    ):
        assert (ids[0], rank) == (other_ids[0], other_rank)
        # columns are as wide as the widest entry of their frame
        known, others = (np.array(each)[np.array(each) > -np.inf] for each in (values, other_values))
        assert known.tolist() == pytest.approx(others.tolist(), abs=1e-3)


def texts(outcomes: dict[int, Outcome]) -> dict[int, list[int]]:
    return {stream: outcome.tokens for stream, outcome in outcomes.items()}


def assert_all_free(engine: TorchEngine) -> None:
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used) == (0, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", ["auto", 5])
@pytest.mark.parametrize("method", METHODS)
def test_streams_get_what_they_get_without(
    family: Family, method: str, tokens: str | int, pytestconfig: pytest.Config
) -> None:
    if method == "oracle" and tokens == "auto":
        pytest.skip("the oracle takes a number of its own")
    count = 500 if pytestconfig.getoption("--slow") else MIXES
    plain = family.plain(count)
    options = {} if method == "oracle" else {"speculative_tokens": tokens}
    engine = family.engine(method, texts(plain), **options)
    drafted = run_all(engine, mixes(count))
    assert_alike(plain, drafted, assert_same)
    assert_all_free(engine)
    counters = engine.metrics()
    assert counters["spec_decode_accepted_tokens_total"] > 0
    assert counters["spec_decode_accepted_tokens_total"] <= counters["spec_decode_draft_tokens_total"]


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_stream_goes_on_with_the_same_tokens(family: Family, method: str) -> None:
    plain = family.plain(MIXES)
    random = np.random.default_rng(2)
    requests, cuts = [], {}
    for request in mixes(MIXES):
        tokens = plain[request.stream].tokens
        if len(tokens) > 1 and request.sampling.prompt_logprobs < 0:
            cuts[request.stream] = int(random.integers(1, len(tokens)))
            requests.append(resumed(request, tokens[: cuts[request.stream]]))
    drafted = run_all(family.engine(method, texts(plain)), requests)
    for stream, cut in cuts.items():
        assert drafted[stream].tokens == plain[stream].tokens[cut:]
        assert drafted[stream].finish == plain[stream].finish
        assert drafted[stream].positions[0] == cut


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": "on"},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"kv_cache_memory": FEW_BLOCKS, "speculative_tokens": 4},
        {
            "kv_cache_memory": FEW_BLOCKS,
            "enable_prefix_caching": False,
            "async_scheduling": "on",
        },
        {"max_num_seqs": 3, "scheduling_policy": "priority"},
    ],
    ids=["ahead", "small-steps", "preempted", "preempted-ahead", "few-slots"],
)
@pytest.mark.parametrize("method", ["ngram", "draft", "oracle"])
def test_streams_get_the_same_in_every_schedule(family: Family, method: str, options: dict[str, Any]) -> None:
    plain = family.plain(MIXES)
    engine = family.engine(method, texts(plain), **options)
    driver = Driver(engine)
    for request in mixes(MIXES):
        driver.submit(request)
        if request.stream % 3:
            driver.step()
    drafted = driver.run()
    assert_alike(plain, drafted, assert_same)
    assert_all_free(engine)
    if "kv_cache_memory" in options and "async_scheduling" not in options:
        assert engine.metrics()["preemptions_total"] > 0


@pytest.mark.parametrize("ahead", ["on", "off"])
def test_aborted_streams_end_with_what_they_have(family: Family, ahead: str) -> None:
    plain = family.plain(MIXES)
    engine = family.engine("oracle", texts(plain), async_scheduling=ahead)
    driver = Driver(engine)
    requests = mixes(MIXES)
    random = np.random.default_rng(8)
    for request in requests:
        driver.submit(request)
    for _ in range(30):
        if not engine.has_work():
            break
        driver.step()
        engine.abort(0, random.integers(0, MIXES, size=2).tolist())
    aborted = 0
    for stream, outcome in driver.run().items():
        whole = plain[stream]
        aborted += outcome.finish == FinishReason.ABORT
        assert outcome.tokens == whole.tokens[: len(outcome.tokens)]
        assert outcome.finish in (whole.finish, FinishReason.ABORT)
    assert aborted > 3
    assert_all_free(engine)


def test_what_a_grammar_forces_is_a_draft(family: Family) -> None:
    """Without a draft from anywhere else."""
    requests = [
        submit(stream, [7 + stream], grammar=GRAMMARS[0], temperature=1.0, max_tokens=200)
        for stream in range(4)
    ]
    plain = run_all(make_engine(family.target, **ENGINE), requests)
    engine = family.engine("oracle", {stream: [] for stream in range(4)})
    driver = Driver(engine)
    for request in requests:
        driver.submit(request)
    steps = 0
    while engine.has_work():
        driver.step()
        steps += 1
    assert_alike(plain, driver.outcomes, assert_same)
    counters = engine.metrics()
    # forced are characters, of which some can be told by several tokens
    assert (
        counters["spec_decode_accepted_tokens_total"] > 0.8 * counters["spec_decode_draft_tokens_total"] > 0
    )
    assert steps < 0.7 * max(len(outcome.tokens) for outcome in plain.values())


def test_a_draft_model_beside_adapters(family: Family, tmp_path: Path) -> None:
    """It runs without them, and their options are not its own."""
    engine = family.engine(
        "draft", enable_lora=True, lora_dir=str(tmp_path), max_loras=2, batch_invariant=False
    )
    assert run_all(engine, [submit(0, [5, 6, 7])])[0].tokens
    assert engine.metrics()["spec_decode_drafts_total"] > 0


def test_a_draft_model_with_other_tokens_is_refused_before_any_weights_are_loaded(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for directory, words in ((target, ("tr", "no")), (draft, ("tr", "on"))):
        make_model("llama", directory)
        byte_level_tokenizer(*words).save(str(directory / "tokenizer.json"))
    (target / "model.safetensors").unlink()
    options = {"speculative_method": "draft", "draft_model": "small", "draft_dir": str(draft)}
    with pytest.raises(ConfigError, match="--draft-model small: its tokenizer has other tokens than that of"):
        make_engine(target, **options)


def test_a_draft_model_of_fewer_positions_is_said_to_draft_for_less(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    make_model("llama", target)
    make_model("llama", draft, max_position_embeddings=64)
    options = {"speculative_method": "draft", "draft_model": "small", "draft_dir": str(draft)}
    engine = make_engine(target, **options)
    assert re.search(r"--draft-model small takes 64 tokens, the model \d+: longer histories", caplog.text)
    outcome = run_all(engine, [submit(0, [5, 6, 7], max_tokens=100, ignore_eos=True)])[0]
    assert len(outcome.tokens) == 100


def test_a_number_of_tokens_bounds_what_a_grammar_forces(family: Family) -> None:
    engine = family.engine("ngram", speculative_tokens=2)
    run_all(engine, [submit(0, [7], grammar=GRAMMARS[0], max_tokens=200)])
    per_position = [
        name for name in engine.metrics() if name.startswith("spec_decode_accepted_tokens_per_pos")
    ]
    assert len(per_position) == 2


def test_a_reset_forgets_earlier_outputs(family: Family) -> None:
    engine = family.engine("suffix", speculative_tokens=8)

    def drafted() -> float:
        before = engine.metrics()["spec_decode_draft_tokens_total"]
        run_all(engine, [submit(0, [5, 6, 7], temperature=1.5, max_tokens=40, ignore_eos=True)])
        return engine.metrics()["spec_decode_draft_tokens_total"] - before

    first = drafted()
    assert drafted() > first + 20
    engine.call("reset_prefix_cache", {})
    assert drafted() == first
