"""Cached segments have the ids of the whole prompt, for every kind of tokenizer."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Reference

from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.prompt_encoder import SEGMENTED_ABOVE, PromptEncoder, segment_marker
from penstock.generation.prompt.tokenizer import Tokenizer
from tests.generation.planning import tiny_template, tiny_tokenizer
from tests.tokenizer_kinds import ADDED, CORPUS, TRAINED

START, END = "<|im_start|>", "<|im_end|>"
CHATML = ChatTemplate(
    {
        "default": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    },
    {},
)
INSTRUCT = ChatTemplate(
    {
        "default": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    },
    {},
)


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


def first_word_only() -> Reference:
    """Metaspace marks the first word of a text alone."""
    tokenizer = TRAINED["BPE with byte fallback"]()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def prepended() -> Reference:
    """A normalizer marks the beginning of every text between added tokens."""
    tokenizer = TRAINED["BPE with byte fallback"]()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


KINDS = {**TRAINED, "Metaspace, first word only": first_word_only, "normalizer that prepends": prepended}


def load(reference: Reference, directory: Path) -> Tokenizer:
    reference.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


def make(kind: str, directory: Path) -> Tokenizer:
    reference = KINDS[kind]()
    reference.add_tokens(ADDED)
    reference.add_tokens([special("[INST]"), special("[/INST]"), special(START), special(END)])
    reference.add_tokens([AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True)])
    reference.add_tokens([AddedToken("word", single_word=True), AddedToken("Straße", normalized=True)])
    return load(reference, directory)


# -- ids


def fuzzed(draw: random.Random, template: ChatTemplate) -> list[list[dict[str, str]]]:
    """The turns of a conversation, each with all messages so far; now and then an earlier one changes."""
    pieces = [
        *CORPUS,
        *ADDED,
        START,
        END,
        "[INST]",
        " <left>",
        "<right> ",
        "word",
        "wordy",
        " ",
        "\n",
        "",
        "▁",
    ]
    turns = []
    messages: list[dict[str, str]] = []
    for _ in range(draw.randint(2, 5)):
        for role in ("user", "assistant"):
            texts = draw.choices(pieces, k=draw.randint(0, 12))
            texts += [
                "".join(chr(draw.choice((draw.randrange(1, 0x250), 0x1F600, 0xFFFD))) for _ in range(5))
            ]
            messages.append({"role": role, "content": "".join(draw.sample(texts, len(texts)))})
        if not draw.randrange(8):
            draw.choice(messages)["content"] += draw.choice(pieces)
        turns.append([dict(message) for message in messages])
    return turns


def check_conversations(tokenizer: Tokenizer, template: ChatTemplate, count: int, seed: int) -> None:
    draw = random.Random(seed)
    marker = segment_marker(tokenizer, template)
    assert marker is not None
    encoder = PromptEncoder(tokenizer, marker, max_cached_bytes=1 << 20)
    for _ in range(count):
        for messages in fuzzed(draw, template):
            text = template.render([*messages])
            expected = tokenizer.raw.encode_batch_fast([text], add_special_tokens=False)[0].ids
            assert encoder.encode(text, False, draw.choice((None, "salt"))) == tokenizer.pack(expected)


@pytest.fixture(autouse=True)
def short_prompts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.generation.prompt.prompt_encoder.SEGMENTED_ABOVE", 0)


@pytest.mark.parametrize("template", [CHATML, INSTRUCT], ids=["chatml", "instruct"])
@pytest.mark.parametrize("kind", KINDS)
def test_conversations_have_the_ids_of_their_whole_text(
    kind: str, template: ChatTemplate, tmp_path: Path
) -> None:
    check_conversations(make(kind, tmp_path), template, 40, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, INSTRUCT], ids=["chatml", "instruct"])
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_conversations_have_the_ids_of_their_whole_text(
    kind: str, template: ChatTemplate, tmp_path: Path
) -> None:
    check_conversations(make(kind, tmp_path), template, 5000, seed=2)


def test_with_special_tokens_the_whole_is_encoded() -> None:
    encoder = PromptEncoder(tiny_tokenizer(), START)
    text = f"{START}user\nHi{END}"
    assert encoder.encode(text, True, None) == tiny_tokenizer().encode_bytes(text, True)
    assert encoder.cached_bytes == 0


# -- the marker


def test_the_marker_begins_every_message() -> None:
    assert segment_marker(tiny_tokenizer(), tiny_template()) == START
    assert segment_marker(tiny_tokenizer(), None) is None


@pytest.mark.parametrize(
    "added",
    [
        [special(START, lstrip=True)],
        [special(START, single_word=True)],
        [AddedToken(START, normalized=True)],
        [special(START), special("x<|im")],
        [special(START), special("\n<|im_start|>user")],
    ],
    ids=["takes spaces", "whole word", "normalized", "covered at its begin", "covered"],
)
def test_a_token_that_may_begin_elsewhere_is_no_marker(added: list[AddedToken], tmp_path: Path) -> None:
    reference = TRAINED["byte-level BPE"]()
    reference.add_tokens(added)
    assert segment_marker(load(reference, tmp_path), CHATML) is None


def test_text_that_is_no_added_token_is_no_marker(tmp_path: Path) -> None:
    tokenizer = load(TRAINED["byte-level BPE"](), tmp_path)
    assert segment_marker(tokenizer, CHATML) is None
    encoder = PromptEncoder(tokenizer, None)
    assert encoder.encode("a b", False, None) == tokenizer.encode_bytes("a b", False)


def test_a_tokenizer_whose_parts_differ_has_no_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(tiny_tokenizer().raw, None)

    def counts_its_text(text: str, add_special_tokens: bool = True) -> tuple[bytes, int]:
        return len(text).to_bytes(4, "little"), 1

    monkeypatch.setattr(tokenizer, "encode_bytes", counts_its_text)
    assert segment_marker(tokenizer, tiny_template()) is None


def test_a_template_that_refuses_the_probe_has_no_marker() -> None:
    refuses = ChatTemplate({"default": "{{ raise_exception('no') }}"}, {})
    assert segment_marker(tiny_tokenizer(), refuses) is None


# -- the cache


class Counted(Tokenizer):
    """Notes what is encoded."""

    def __init__(self) -> None:
        super().__init__(tiny_tokenizer().raw, None)
        self.encoded: list[str] = []

    def encode_bytes(self, text: str, add_special_tokens: bool = True) -> tuple[bytes, int]:
        self.encoded.append(text)
        return super().encode_bytes(text, add_special_tokens)


def test_a_turn_encodes_its_new_messages() -> None:
    tokenizer = Counted()
    encoder = PromptEncoder(tokenizer, START)
    first = f"<s>{START}user\nOne{END}\n{START}assistant\n"
    second = f"{first}Two{END}\n{START}user\nThree{END}\n{START}assistant\n"
    encoder.encode(first, False, None)
    tokenizer.encoded.clear()
    encoder.encode(second, False, None)
    assert tokenizer.encoded == [f"{START}assistant\nTwo{END}\n", f"{START}user\nThree{END}\n"]
    tokenizer.encoded.clear()
    encoder.encode(second, False, "another salt")
    assert len(tokenizer.encoded) == 5


def test_the_cache_is_bounded_and_keeps_what_is_used() -> None:
    tokenizer = Counted()
    encoder = PromptEncoder(tokenizer, START, max_cached_bytes=20_000)
    for number in range(200):
        encoder.encode(f"{START}system{START}{number} {'x' * 100}", False, None)
        assert encoder.cached_bytes <= 20_000
    sizes = (sys.getsizeof(key[2]) + sys.getsizeof(entry[0]) for key, entry in encoder._cached.items())
    assert encoder.cached_bytes >= sum(sizes)
    assert tokenizer.encoded.count(f"{START}system") == 1
    encoder.encode(START + "y" * 40_000, False, None)
    assert encoder.cached_bytes <= 20_000
    assert (None, True, "system") in encoder._cached


def test_threads_share_the_cache() -> None:
    encoder = PromptEncoder(tiny_tokenizer(), START, max_cached_bytes=40_000)
    draw = random.Random(3)
    messages = [f"{START}user\n{text}{number}{END}\n" for number, text in enumerate(CORPUS)]
    texts = ["".join(draw.choices(messages, k=20)) for _ in range(200)]
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda text: encoder.encode(text, False, None), texts))
    assert ids == [tiny_tokenizer().encode_bytes(text, False) for text in texts]
    assert encoder.cached_bytes == sum(entry[1] for entry in encoder._cached.values()) <= 40_000


def test_short_prompts_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.generation.prompt.prompt_encoder.SEGMENTED_ABOVE", SEGMENTED_ABOVE)
    encoder = PromptEncoder(tiny_tokenizer(), START)
    messages = chain.from_iterable((START, text) for text in CORPUS[:9])
    encoder.encode("".join(messages), False, None)
    assert encoder.cached_bytes == 0
