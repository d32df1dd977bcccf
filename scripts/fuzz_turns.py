"""Plays sessions of agents against every real chat template, with a memory of turns and without.

    python scripts/fuzz_turns.py PACKAGES --sessions 10000

``PACKAGES``: the folder into which ``make test-templates`` downloads (``.venv-templates/packages``). Every
turn must have the same prompt, token ids and warning, or the same error. Prints how many turns were resumed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.resumed_loop import LoopState, Rendering
from tests.generation.prompt.played_sessions import Session
from tests.generation.prompt.test_turn_memory import DIALECTS, Server
from tests.templates import archives

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
counts: Counter[str] = Counter()


class _Counted(Rendering):
    def finish(self, text: str) -> LoopState | None:
        counts["resumed" if self.resumed else "rendered whole"] += 1
        return super().finish(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("packages", type=Path)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--part", type=int, default=0, help="which part of the templates, of --parts")
    parser.add_argument("--parts", type=int, default=1)
    options = parser.parse_args()
    archives.PACKAGES = options.packages
    templates = archives.real_templates()
    each = -(-options.sessions // (len(templates) * len(DIALECTS)))
    began, failed = time.monotonic(), 0
    for number, (name, source) in enumerate(templates.items()):
        if number % options.parts != options.part:
            continue
        try:
            server = Server(ChatTemplate({"default": source}, SPECIAL_TOKENS))
        except ValueError as error:
            print(f"{name}: {error}")
            continue
        before = Counter(counts)
        for dialect in DIALECTS:
            for seed in range(each):
                session = Session(dialect, number * 1_000_003 + seed)
                counts["sessions"] += 1
                for turn, body in enumerate(session.bodies(options.turns)):
                    counts["turns"] += 1
                    kept, anew = server.prompt(dialect, body), server.prompt(dialect, body, keeps=False)
                    if kept != anew:
                        failed += 1
                        print(f"{name}, {dialect}, seed {seed}, turn {turn}: {kept!r:.300} != {anew!r:.300}")
        now = counts - before
        print(f"{name}: {now['resumed']} resumed, {now['rendered whole']} whole", flush=True)
    print(dict(counts), f"{failed} differ, {time.monotonic() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    from penstock.generation.prompt import renderer

    renderer.Rendering = _Counted  # type: ignore[misc]
    sys.exit(main())
