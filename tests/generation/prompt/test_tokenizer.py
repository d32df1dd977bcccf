"""Whatever encodes, the ids are those of ``tokenizers``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Reference

from penstock.generation.prompt.tokenizer import Tokenizer, check_texts
from tests.generation.planning import tiny_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12:30; we'll see 1,000 foxes!",
    "def main(argument: int) -> None:\n    return argument * 2  # twice\n",
    "Größe naïve 日本語のテキスト слова 👍🏽 tokens  and   spaces\t\n",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> Reference:
    reference = Reference(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(reference, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet))
    return reference


def metaspace_with_byte_fallback() -> Reference:
    reference = Reference(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    reference.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    train(reference, trainers.BpeTrainer(vocab_size=600, special_tokens=[*SPECIAL, *bytes_]))
    return reference


def unigram() -> Reference:
    reference = Reference(models.Unigram())
    reference.normalizer = normalizers.NFKC()
    reference.pre_tokenizer = pre_tokenizers.Metaspace()
    reference.decoder = decoders.Metaspace()
    train(reference, trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>"))
    return reference


def word_piece() -> Reference:
    reference = Reference(models.WordPiece(unk_token="<unk>"))
    reference.normalizer = normalizers.BertNormalizer()
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    reference.decoder = decoders.WordPiece()
    train(reference, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL))
    return reference


def train(reference: Reference, trainer: trainers.Trainer) -> None:
    trainer.show_progress = False
    reference.train_from_iterator(CORPUS, trainer)
    reference.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    reference.add_special_tokens([AddedToken("<|end|>", special=True)])
    reference.add_tokens([AddedToken("<tool>", lstrip=True), AddedToken("whole", single_word=True)])


KINDS = [byte_level, metaspace_with_byte_fallback, unigram, word_piece]
TEXTS = st.lists(
    st.text(max_size=12)
    | st.sampled_from(
        ["<s>", "<|end|>", " <tool> ", "whole", "wholesome", "  ", "\n\n", "fox", "’s", "１２"]
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make: Callable[[], Reference] = request.param
    directory = tmp_path_factory.mktemp(make.__name__)
    make().save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


@given(text=TEXTS, special=st.booleans())
def test_ids_are_the_references(tokenizer: Tokenizer, text: str, special: bool) -> None:
    expected = tokenizer.raw.encode(text, add_special_tokens=special).ids
    packed, count = tokenizer.encode_bytes(text, special)
    assert tokenizer.encode(text, special) == expected
    assert (np.frombuffer(packed, "<i4").tolist(), count) == (expected, len(expected))


@given(text=TEXTS, skip=st.booleans())
def test_decoding_is_the_references(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip) == tokenizer.raw.decode(ids, skip_special_tokens=skip)


def test_sizes_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == tokenizer.raw.get_vocab_size()
    end, tool = (tokenizer.raw.token_to_id(token) for token in ("<|end|>", "<tool>"))
    assert end in tokenizer.special_ids
    assert tool not in tokenizer.special_ids
    assert tokenizer.token_strings([1, end, 1 << 20]) == ["<s>", "<|end|>", ""]


@pytest.mark.parametrize("make", [byte_level, metaspace_with_byte_fallback])
@pytest.mark.parametrize("special", [False, True])
def test_bpe_is_encoded_fast(tmp_path: Path, make: Callable[[], Reference], special: bool) -> None:
    make().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.is_fast(special)
    slow = Tokenizer(tokenizer.raw, None)
    assert not slow.is_fast(special)
    assert tokenizer.inline_characters[special] > slow.inline_characters[special]


def test_pack() -> None:
    assert tiny_tokenizer().pack([1, 258]) == (b"\x01\0\0\0\x02\x01\0\0", 2)
    assert tiny_tokenizer().pack([]) == (b"", 0)


def test_the_check_set_is_the_same_every_time() -> None:
    texts = list(check_texts(tiny_tokenizer().raw))
    assert texts == list(check_texts(tiny_tokenizer().raw))
    assert len(texts) > 70
    assert max(map(len, texts)) <= 1000


# -- an encoder is used where it proves exact


def test_an_encoder_that_errs_is_not_used() -> None:
    raw = tiny_tokenizer().raw

    def without_bos(texts: list[str], special: bool) -> tuple[bytes, bytes]:
        ids = raw.encode(texts[0], add_special_tokens=False).ids
        return np.array(ids, "<u4").tobytes(), b""

    tokenizer = Tokenizer(raw, without_bos)
    assert (tokenizer.is_fast(False), tokenizer.is_fast(True)) == (True, False)
    assert tokenizer.encode("def main", True) == raw.encode("def main").ids


def test_an_encoder_that_fails_is_not_used() -> None:
    def fails(texts: list[str], special: bool) -> tuple[bytes, bytes]:
        raise RuntimeError("no")

    assert not Tokenizer(tiny_tokenizer().raw, fails).is_fast(False)


# -- files


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    reference = byte_level()
    reference.enable_truncation(4)
    reference.enable_padding(length=8)
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert len(tokenizer.encode("The quick brown fox jumps over the lazy dog.")) > 8
    assert len(tokenizer.encode("")) == 2
