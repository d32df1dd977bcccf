"""Replays of token sequences as if a model had sampled them: what drafts would have saved."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from penstock.engine.batch.slots import SlotTable
from penstock.engine.speculation.ngram import NgramProposer
from penstock.engine.speculation.proposer import Proposer
from penstock.engine.speculation.suffix import SuffixProposer

ROOT = Path(__file__).parents[3]

Stream = tuple[Sequence[int], Sequence[int]]
"""Prompt and output."""
MakeProposer = Callable[[SlotTable], Proposer]


@dataclass
class Report:
    """Of all steps of all streams; the first token of a step is the model's own."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def accepted_per_step(self) -> float:
        return self.accepted / self.steps

    @property
    def acceptance(self) -> float:
        """Accepted drafts per proposed one."""
        return self.accepted / self.proposed if self.proposed else 0.0


def start(table: SlotTable, slot: int, prompt: Sequence[int]) -> None:
    table.history[slot, : len(prompt)] = prompt
    table.length[slot] = table.base[slot] = len(prompt)


def replay(
    make: MakeProposer, streams: Sequence[Stream], *, drafts: int = 4, rows: int = 1, width: int = 1 << 15
) -> Report:
    """Run streams through a proposer, ``rows`` at a time: a step appends the drafts that equal the output,
    and one more token of it."""
    table = SlotTable(rows, width, [0])
    proposer = make(table)
    waiting, running, report = list(reversed(streams)), {}, Report()
    while waiting or running:
        for slot in range(rows):
            if slot not in running and waiting:
                prompt, output = waiting.pop()
                start(table, slot, prompt)
                proposer.begin(slot)
                running[slot] = [*prompt, *output]
        slots = np.array(sorted(running))
        left = np.array([len(running[slot]) for slot in slots], np.int32) - table.length[slots]
        counts = proposer.propose(slots, np.minimum(left - 1, drafts).astype(np.int32))
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            _append(table, slot, running[slot], count, report)
            if table.length[slot] == len(running[slot]):
                proposer.end(slot)
                del running[slot]
    return report


def _append(table: SlotTable, slot: int, text: list[int], count: int, report: Report) -> None:
    length = int(table.length[slot])
    draft = table.history[slot, length : length + count].tolist()
    accepted = 0
    while accepted < count and draft[accepted] == text[length + accepted]:
        accepted += 1
    table.history[slot, length + accepted] = text[length + accepted]
    table.length[slot] += accepted + 1
    report.steps += 1
    report.proposed += count
    report.accepted += accepted


@cache
def _encode(text: str) -> tuple[int, ...]:
    tokenizer = Tokenizer.from_file(str(ROOT / "penstock" / "demo" / "tokenizer.json"))
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def docs(most: int | None = None) -> list[Stream]:
    """The pages of this project, or the first ``most`` of them, each generated from its first 32 tokens."""
    pages = [_encode(path.read_text()) for path in sorted((ROOT / "docs").glob("*.md"))[:most]]
    return [(page[:32], page[32:]) for page in pages]


def quotation() -> list[Stream]:
    """A page in the prompt, which the output repeats."""
    page = _encode((ROOT / "docs" / "sampling.md").read_text())
    return [(page, page)]


def edits(seed: int = 1) -> list[Stream]:
    """Pages in prompts, which the outputs repeat with 4 changes in 100 tokens."""
    rng = random.Random(seed)
    pages = [
        _encode((ROOT / "docs" / f"{name}.md").read_text()) for name in ("sampling", "streaming", "page")
    ]
    return [(page, [token for old in page for token in _edit(rng, old)]) for page in pages]


def _edit(rng: random.Random, token: int) -> list[int]:
    """The token, or now and then another, none, or another behind it."""
    other = rng.randrange(5, 4096)
    return rng.choices([[token], [other], [], [token, other]], [96, 2, 1, 1])[0]


def records(streams: int = 40, each: int = 5, seed: int = 0) -> list[Stream]:
    """Outputs of some JSON records of one schema; no prompt has the schema."""
    rng = random.Random(seed)
    return [
        (_encode(f"List the orders of customer {rng.randrange(10**6)}.\n"), _encode(_records(rng, each)))
        for _ in range(streams)
    ]


def _records(rng: random.Random, count: int) -> str:
    return json.dumps(
        [
            {
                "order_id": rng.randrange(10**6),
                "status": rng.choice(["shipped", "pending", "cancelled"]),
                "customer": {
                    "name": rng.choice(["Ada", "Bo", "Cy", "Dee", "Eve"]),
                    "city": rng.choice("ABCDEF"),
                },
                "total": rng.randrange(10**5) / 100,
                "currency": "EUR",
                "gift": rng.random() < 0.5,
            }
            for _ in range(count)
        ],
        indent=2,
    )


def noise(streams: int = 8, tokens: int = 2000, vocabulary: int = 50_000, seed: int = 0) -> list[Stream]:
    """Random tokens."""
    rng = np.random.default_rng(seed)
    return [(ids[:100], ids[100:]) for ids in rng.integers(0, vocabulary, (streams, tokens)).tolist()]


CORPORA: dict[str, Callable[[], list[Stream]]] = {
    "quotation": quotation,
    "edits": edits,
    "records": records,
    "docs": docs,
    "noise": noise,
}


def main() -> None:
    """Print what drafts save on each corpus."""
    print("proposer  most  corpus     accepted  proposed (per step)")
    for name, make in (("ngram", NgramProposer), ("suffix", SuffixProposer)):
        for drafts in (4, 8):
            for corpus, streams in CORPORA.items():
                report = replay(make, streams(), drafts=drafts, rows=8)
                proposed = report.proposed / report.steps
                print(f"{name:9} {drafts:4}  {corpus:9} {report.accepted_per_step:9.2f} {proposed:9.2f}")


if __name__ == "__main__":
    main()
