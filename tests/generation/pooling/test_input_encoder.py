"""Inputs have the tokens that transformers' tokenizers give them, whole and truncated."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from penstock.generation.pooling.input_encoder import InputEncoder
from penstock.generation.pooling.plan import EncodedInputs, PoolingPlan
from penstock.generation.prompt.tokenizer import Tokenizer
from penstock.http.errors import ApiError
from penstock.wire.pooling import PoolingTask

transformers = pytest.importorskip("transformers")

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:30!",
    "Größe naïve 日本語のテキスト слова",
] * 4
SPECIAL = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
TYPED = processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
)
UNTYPED = processors.TemplateProcessing(
    single="[CLS]:0 $A:0 [SEP]:0",
    pair="[CLS]:0 $A:0 [SEP]:0 [SEP]:0 $B:0 [SEP]:0",
    special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
)


def _bert(processor: Any = TYPED) -> Reference:
    reference = Reference(models.WordPiece(unk_token="[UNK]"))
    reference.normalizer = normalizers.BertNormalizer()
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _trained(reference, trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL), processor)


def _bert_processing() -> Reference:
    return _bert(processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)))


def _roberta(processor: Any = None) -> Reference:
    reference = Reference(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet)
    return _trained(reference, trainer, processor or processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1)))


def _with_a_last_token() -> Reference:
    return _roberta(
        processors.TemplateProcessing(single="$A [SEP]", pair="$A $B [SEP]", special_tokens=[("[SEP]", 2)])
    )


def _with_bytes_alone() -> Reference:
    return _roberta(processors.ByteLevel(trim_offsets=False))


def _xlm_roberta() -> Reference:
    reference = Reference(models.Unigram())
    reference.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="[UNK]")
    return _trained(reference, trainer, UNTYPED)


def _trained(reference: Reference, trainer: Any, processor: Any) -> Reference:
    trainer.show_progress = False
    reference.train_from_iterator(CORPUS, trainer)
    reference.post_processor = processor
    return reference


KINDS = [_bert, _bert_processing, _roberta, _with_a_last_token, _with_bytes_alone, _xlm_roberta]


class Both(NamedTuple):
    tokenizer: Tokenizer
    judge: Any
    """Transformers' tokenizer of the same file."""

    def expected(self, inputs: Any, **options: Any) -> list[tuple[list[int], int]]:
        found = []
        for each in inputs:
            # in lists: a pair whose second text is empty counts as none otherwise
            texts = [[text] for text in (each if isinstance(each, tuple) else (each,))]
            encoded = self.judge(*texts, return_token_type_ids=True, **options)
            [ids], [types] = encoded["input_ids"], encoded["token_type_ids"]
            found.append((ids, types.index(1) if 1 in types else 0))
        return found

    def found(self, inputs: Any, most: int = 10_000, **options: Any) -> list[tuple[list[int], int]]:
        return rows(InputEncoder(self.tokenizer, most).encode(plan(inputs, **options)))


def plan(inputs: Any, **options: Any) -> PoolingPlan:
    return PoolingPlan(api="embeddings", model="m", task=PoolingTask.EMBED, inputs=inputs, **options)


def rows(encoded: EncodedInputs) -> list[tuple[list[int], int]]:
    ids = np.frombuffer(encoded.ids, "<i4").tolist()
    ends = np.cumsum(encoded.lengths).tolist()
    assert ends[-1] == len(ids)
    starts = [0, *ends[:-1]]
    return [
        (ids[start:end], second)
        for start, end, second in zip(starts, ends, encoded.seconds.tolist(), strict=True)
    ]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__.strip("_"))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    make: Callable[[], Reference] = request.param
    directory = tmp_path_factory.mktemp("tokenizer")
    make().save(str(directory / "tokenizer.json"))
    judge = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    return Both(Tokenizer.load(directory), judge)


def texts(count: int, most: int = 40) -> list[str]:
    draw = random.Random(count)
    words = [*" ".join(CORPUS[:2]).split(), "[SEP]", "  ", "fox,", "\n", "日本", "ﬁ"]
    return [" ".join(draw.choices(words, k=draw.randrange(1, most))) for _ in range(count)]


PAIRS = [*itertools.pairwise(texts(60)), ("a", ""), ("", "a"), ("[SEP] fox", "x [CLS]")]


@pytest.mark.parametrize("special", [True, False])
def test_whole_inputs(both: Both, special: bool) -> None:
    single = [*filter(str.strip, texts(300)), "[CLS] a [SEP]"]
    assert both.found(single, add_special_tokens=special) == both.expected(single, add_special_tokens=special)
    found = both.found(PAIRS, add_special_tokens=special)
    assert found == both.expected(PAIRS, add_special_tokens=special)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("most", [8, 9, 17, 64])
@pytest.mark.parametrize("inputs", [texts(24), PAIRS], ids=["texts", "pairs"])
def test_truncated_inputs(both: Both, inputs: Any, most: int, side: str) -> None:
    both.judge.truncation_side = side
    expected = both.expected(inputs, truncation="longest_first", max_length=most)
    assert both.found(inputs, truncate=most, truncate_left=side == "left") == expected
    assert both.found(inputs, most, truncate=1000, truncate_left=side == "left") == expected, "the model's"


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_cut_before_they_are_encoded(both: Both, side: str) -> None:
    long = " ".join(texts(1500))
    few = " " * 60_000 + "fox" + " " * 60_000 + "dog"
    inputs = [long, "a fox", few, few[::-1], long[50_000:]]
    both.judge.truncation_side = side
    expected = both.expected(inputs, truncation=True, max_length=50)
    assert both.found(inputs, 100, truncate=50, truncate_left=side == "left") == expected
    pairs = [("a fox", long), (long, "a fox"), (few, "a fox")]
    expected = both.expected(pairs, truncation="longest_first", max_length=50)
    assert both.found(pairs, 100, truncate=50, truncate_left=side == "left") == expected


def test_a_prompt_is_before_every_first_text(both: Both) -> None:
    single, pairs = texts(3), PAIRS[:3]
    assert both.found(single, prompt="query: ") == both.found([f"query: {each}" for each in single])
    prompted = [(f"query: {first}", second) for first, second in pairs]
    assert both.found(pairs, prompt="query: ") == both.found(prompted)


@pytest.mark.parametrize("special", [True, False])
def test_tokens_of_a_prompt_that_do_not_count(bert: Tokenizer, special: bool) -> None:
    """As sentence-transformers counts them: the prompt by itself, without the special token behind it."""
    inputs = plan(["a b", "b"], prompt="a b: ", add_special_tokens=special)
    alone = InputEncoder(bert, 100).encode(plan(["a b:"], add_special_tokens=special))
    found = InputEncoder(bert, 100, False).encode(inputs)
    assert found.skipped == alone.lengths[0] - special
    assert InputEncoder(bert, 100).encode(inputs).skipped == 0
    unprompted = plan(["a b"], add_special_tokens=special)
    assert InputEncoder(bert, 100, False).encode(unprompted).skipped == 0


def test_threads_encode_at_the_same_time(both: Both) -> None:
    encoder = InputEncoder(both.tokenizer, 1000)
    plans = [
        plan(inputs, truncate=most, truncate_left=most % 2 == 0)
        for inputs, most in itertools.product((texts(20), PAIRS), range(6, 26))
    ]
    expected = [rows(encoder.encode(each)) for each in plans]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda each: rows(InputEncoder.encode(encoder, each)), plans))
    assert found == expected


# -- with one tokenizer


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("bert")
    _bert().save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


def _ids(*ids: int) -> bytes:
    return np.array(ids, "<i4").tobytes()


def test_token_ids_are_taken_as_they_are(bert: Tokenizer) -> None:
    inputs = [_ids(5, 6, 7), "a fox", _ids(8)]
    encoder = InputEncoder(bert, 4)
    [first, second, third] = rows(encoder.encode(plan(inputs, truncate=2, prompt="query: ")))
    assert (first, third) == (([5, 6], 0), ([8], 0))
    assert second[0] == [1, 2]
    [first, *_] = rows(encoder.encode(plan(inputs, truncate=2, truncate_left=True)))
    assert first == ([6, 7], 0)


@pytest.mark.parametrize(
    ("inputs", "options", "name", "tokens"),
    [
        (["fox", "fox " * 7, "fox"], {}, "input[1]", "9 tokens"),
        ([_ids(*range(4, 14))], {}, "input", "10 tokens"),
        ([("fox " * 3, "fox " * 4)], {"field": "documents"}, "documents", "10 tokens"),
        ([("fox", "fox"), ("fox " * 3, "fox " * 4)], {}, "input[1]", "10 tokens"),
        (["fox", "fox " * 100_000], {}, "input[1]", "more than 8 tokens"),
        ([("a", "fox"), ("fox " * 100_000, "a")], {}, "input[1]", "more than 8 tokens"),
        ([("a", "fox"), ("a", "fox " * 100_000)], {}, "input[1]", "more than 8 tokens"),
    ],
)
def test_longer_inputs_are_refused(
    bert: Tokenizer, inputs: Any, options: dict[str, Any], name: str, tokens: str
) -> None:
    with pytest.raises(ApiError) as caught:
        InputEncoder(bert, 8).encode(plan(inputs, **options))
    error = caught.value
    assert error.message == (
        f"This model's maximum context length is 8 tokens. However, {name} has {tokens}. "
        "Please reduce its length, or ask for truncation."
    )
    assert (error.status, error.param) == (400, options.get("field", "input"))
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("inputs", "queries", "param", "name"),
    [
        (["fox", "fox", "fox " * 7], 1, "documents", "documents[1]"),
        (["fox", "fox " * 7], 1, "documents", "documents"),
        (["fox " * 7, "fox", "fox"], 1, "query", "query"),
        (["fox", "fox " * 7, "fox", "fox"], 2, "query", "query[1]"),
        (["fox", "fox", "fox", "fox " * 100_000], 2, "documents", "documents[1]"),
    ],
)
def test_queries_and_documents_are_named_as_in_the_request(
    bert: Tokenizer, inputs: list[str], queries: int, param: str, name: str
) -> None:
    of_both = plan(inputs, field="documents", before=("query", queries))
    with pytest.raises(ApiError, match=f"However, {re.escape(name)} has") as caught:
        InputEncoder(bert, 8).encode(of_both)
    assert caught.value.param == param


def test_inputs_without_tokens_are_refused(bert: Tokenizer) -> None:
    encoder = InputEncoder(bert, 8)
    assert rows(encoder.encode(plan([""]))) == [([1, 2], 0)]
    for inputs in (["a", ""], ["a", b""], [("a", "a"), ("", "")]):
        with pytest.raises(ApiError, match="empty") as caught:
            encoder.encode(plan(inputs, add_special_tokens=False))
        assert "input[1]" in caught.value.message
    with pytest.raises(ApiError, match="adds 3 special tokens"):
        encoder.encode(plan([("a", "b")], truncate=2))


class Counting(Tokenizer):
    """Counts the characters that it encodes."""

    characters = 0

    def encode_each(self, texts: list[str], add_special_tokens: bool = True) -> list[bytes]:
        self.characters += sum(map(len, texts))
        return super().encode_each(texts, add_special_tokens)

    def encode_bytes(self, text: str, add_special_tokens: bool = True) -> tuple[bytes, int]:
        self.characters += len(text)
        return super().encode_bytes(text, add_special_tokens)


def test_little_of_a_long_text_is_encoded(bert: Tokenizer) -> None:
    counting = Counting(bert.raw, None)
    encoder = InputEncoder(counting, 100)
    assert encoder.encode(plan(["fox " * 1_000_000], truncate=100)).lengths.tolist() == [100]
    assert counting.characters < 10_000
    with pytest.raises(ApiError):
        encoder.encode(plan(["fox " * 1_000_000]))
    assert counting.characters < 100_000


def test_a_query_is_encoded_once(bert: Tokenizer) -> None:
    counting = Counting(bert.raw, None)
    pairs = [("the same query", f"document {number}") for number in range(100)]
    InputEncoder(counting, 100).encode(plan(pairs, prompt="query: "))
    assert counting.characters == len("query: the same query") + sum(len(each) for _, each in pairs)


def test_cost_counts_characters_and_inputs(bert: Tokenizer) -> None:
    encoder = InputEncoder(bert, 100)
    one = encoder.cost(plan(["fox"]))
    assert encoder.cost(plan(["fox " * 1000])) == one - 3 + 4000
    assert encoder.cost(plan([("fox", "fox")])) == one + 3
    assert encoder.cost(plan(["fox"] * 10, prompt="query: ")) == 10 * (one + 7)
    assert encoder.cost(plan([_ids(*range(1000))])) == one - 3
