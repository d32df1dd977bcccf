"""What tests of vLLM's engine share: a small random model, and streams step by step."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import zmq

from penstock.config.serve import ServeConfig
from penstock.engine.attach.engine import AttachedEngine, ModelFacts
from penstock.engine.attach.launch.start_engine import start_engine as start_vllm
from penstock.engine.base import StepRows
from tests.engine.support import Received, byte_level_tokenizer, submit

VOCAB, EOS = 320, 1
SLOTS = 8
STEP_S = 60.0
PROMPT = [40, 41, 42, 43]


def start_engine(
    directory: Path, run_dir: Path, engine_args: list[str], options: dict[str, Any]
) -> AttachedEngine:
    """A process of vLLM's with the model in ``directory``, attached; ``options``: those that were given."""
    config = ServeConfig(engine="vllm", engine_args=engine_args, **options)
    given = sorted(options)
    with tempfile.TemporaryDirectory() as sockets:  # a short path, of which sockets need one
        process = start_vllm(
            config,
            str(directory),
            run_dir=sockets,
            rank=0,
            epoch=0,
            given=given,
            progress=lambda text, fraction: None,
        )
    return AttachedEngine(
        config, ModelFacts(str(directory)), process, run_dir=str(run_dir), rank=0, given=given
    )


def wait(engine: AttachedEngine) -> None:
    """Until vLLM sends something, or for a tenth of a second."""
    poller = zmq.Poller()
    for wakeup in engine.wakeups:
        poller.register(wakeup, zmq.POLLIN)
    poller.poll(100)


def step(engine: AttachedEngine) -> StepRows:
    """The next step that has something to do."""
    deadline = time.monotonic() + STEP_S
    while not engine.can_step():
        assert time.monotonic() < deadline, "vLLM gives no output"
        wait(engine)
    return engine.step()


def make_model(directory: Path) -> None:
    """Attention on a CPU wants heads of 32 or more. The weights are wide enough to avoid near ties."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=EOS,
        initializer_range=0.4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
    )


class Run(Received):
    """What the streams of API server 0 got, with logprobs as (ids, values) per token."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: dict[int, list[tuple[list[int], list[float]]]] = {}
        self.prompts: dict[int, list[tuple[int, list[int]]]] = {}
        self.cached: dict[int, int] = {}

    def take(self, rows: StepRows) -> None:
        self.step(rows)
        count = [1] * len(rows.stream) if rows.count is None else rows.count.tolist()
        owner = [int(stream) for stream, n in zip(rows.stream, count, strict=True) for _ in range(n)]
        if rows.logprobs is not None:
            scored = rows.logprobs
            for place, token in enumerate(scored.token.tolist()):
                entry = (scored.ids[place].tolist(), scored.values[place].tolist())
                assert entry[0][0] == rows.tokens[token]
                self.logprobs.setdefault(owner[token], []).append(entry)
        if rows.prompt is not None:
            for place, row in enumerate(rows.prompt.row.tolist()):
                entry = (int(rows.prompt.position[place]), rows.prompt.ids[place].tolist())
                self.prompts.setdefault(int(rows.stream[row]), []).append(entry)
        if rows.cached is not None:
            for stream, cached in zip(rows.stream.tolist(), rows.cached.tolist(), strict=True):
                self.cached[stream] = max(self.cached.get(stream, 0), cached)


def run(engine: AttachedEngine, received: Run | None = None) -> Run:
    """Until nothing is left to do."""
    received = received or Run()
    for _ in range(2000):
        if not engine.has_work():
            return received
        received.take(step(engine))
    raise AssertionError("the engine does not come to an end")


def generate(engine: AttachedEngine, **request: Any) -> list[int]:
    """The tokens of one greedy stream."""
    engine.submit(0, submit(0, **{"prompt": PROMPT, "temperature": 0.0, "ignore_eos": True} | request))
    return run(engine).tokens[0]
