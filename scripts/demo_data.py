"""Tokens of the demo model's training text: tokenizer, chat format, packed sequences and their order."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2
import torch
from demo_corpus import Conversation, Corpus, chats
from demo_tools import tool_chats
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN, END, IM_START, IM_END, PAD = "<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
VOCABULARY = 4096
PHASES = ((0.65, 256), (0.9, 512), (1.0, 1024))
"""(share of the time at which it ends, tokens per sequence): short sequences first, they cost less per token.

The model is never shown a sequence longer than the last one.
"""
VALIDATION_WINDOW = 256
VALIDATION_ROWS = 8
"""Sequences per validation batch; an incomplete last batch is left out."""
FINISH_PHASES = ((1.0, 512),)
"""The same for a finishing run."""
REPLAYED, REPLAYED_ANSWERS = 1500, 100
"""Documents, and other answers, in one epoch of a finishing run, so that they are not unlearnt."""
IGNORED = -100
"""Label of padding, as torch's cross entropy defines it."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is split before byte pairs are merged: the pattern of Llama 3's tokenizer."""

CHAT_TEMPLATE = Path(__file__).with_name("demo_chat_template.jinja").read_text("utf-8").rstrip("\n")
"""How messages become a prompt; tools are shown to the model as calls with types in the place of values."""
TOOL_CHATS = 700
"""Conversations with tools in one epoch of a finishing run."""

Batch = tuple[torch.Tensor, torch.Tensor]
"""(inputs, labels), both int64[B, window]."""


@dataclass(frozen=True)
class Sequences:
    """`rows` int64[N, window + 1]: token ids, padded with `pad`."""

    rows: torch.Tensor
    pad: int

    def batch(self, indices: torch.Tensor) -> Batch:
        """The rows at `indices` as (inputs, labels); padding is `IGNORED` in the labels."""
        rows = self.rows[indices]
        labels = rows[:, 1:].clone()
        labels[labels == self.pad] = IGNORED
        return rows[:, :-1].contiguous(), labels


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with `VOCABULARY` entries; encoding prepends `<|begin|>` as Llama tokenizers do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END, IM_START, IM_END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = token_id(tokenizer, BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token. Raises KeyError for a token the tokenizer does not have."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def render_chat(chat: Conversation) -> str:
    """What `CHAT_TEMPLATE` gives for a conversation, without the leading `<|begin|>`."""
    return TEMPLATE.render(messages=chat.messages, tools=chat.tools, bos_token="")


def _environment() -> jinja2.Environment:
    """As `transformers` renders chat templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


TEMPLATE = _environment().from_string(CHAT_TEMPLATE)


def pack(pieces: list[list[int]], window: int, pad: int) -> torch.Tensor:
    """Fills rows of `window` + 1 tokens, int64[N, window + 1]; only a piece longer than a row is cut."""
    length = window + 1
    rows: list[list[int]] = []
    opened: list[list[int]] = []
    for piece in pieces:
        for start in range(0, len(piece), length):
            part = piece[start : start + length]
            row = next((row for row in opened if len(row) + len(part) <= length), None)
            if row is None:
                row = []
                rows.append(row)
                opened = [*opened[-15:], row]
            row.extend(part)
    return torch.tensor([row + [pad] * (length - len(row)) for row in rows])


class Data:
    """Turns the corpus into batches: documents are encoded once, chats are worded anew for every epoch.

    A finishing run (`finish`) sees the familiar part of the corpus and a small sample of the rest.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int, finish: bool) -> None:
        self.corpus, self.tokenizer, self.seed = corpus, tokenizer, seed
        self.familiar = corpus.familiar() if finish else None
        self.phases = FINISH_PHASES if finish else PHASES
        self.end, self.pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
        self.documents = self._encode(corpus.documents)
        self.held_out = Sequences(pack(self._encode(corpus.held_out), VALIDATION_WINDOW, self.pad), self.pad)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [[*encoding.ids, self.end] for encoding in self.tokenizer.encode_batch(texts)]

    def epoch(self, number: int, window: int) -> Sequences:
        """The documents and one wording of the chats, shuffled by (seed, number)."""
        rng = random.Random(f"{self.seed}/{number}")
        if self.familiar is None:
            documents, conversations = self.documents, chats(self.corpus, rng)
        else:
            documents = self._encode(self.familiar.documents) + rng.sample(self.documents, REPLAYED)
            others = Corpus(answers=rng.sample(self.corpus.answers, REPLAYED_ANSWERS))
            conversations = chats(self.familiar, rng, small_talk_repeats=1) + chats(others, rng)
            plain = self.familiar.small_talk + self.familiar.answers
            conversations += tool_chats(plain, TOOL_CHATS, rng)
        pieces = documents + self._encode([render_chat(chat) for chat in conversations])
        rng.shuffle(pieces)
        return Sequences(pack(pieces, window, self.pad), self.pad)

    def batches(self, tokens: int, progress: Callable[[], float]) -> Iterator[Batch]:
        """Batches of about `tokens` tokens until `progress()` reaches 1; the phases set their width."""
        for number in range(sys.maxsize):
            window = self._window(progress())
            sequences = self.epoch(number, window)
            generator = torch.Generator().manual_seed(self.seed + number)
            order = torch.randperm(len(sequences.rows), generator=generator)
            for indices in torch.split(order, tokens // window):
                done = progress()
                if done >= 1:
                    return
                if window != self._window(done):
                    break
                if len(indices) == tokens // window:
                    yield sequences.batch(indices)

    def _window(self, done: float) -> int:
        return next((window for end, window in self.phases if done < end), self.phases[-1][1])
