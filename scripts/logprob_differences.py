"""Largest differences between the torch engine's logprobs and those of transformers, with the same weights.

    python -m scripts.logprob_differences [--model DIR] [--dtypes float32 bfloat16 float16] [--streams 16]

A trainer computes the logprobs of sampled tokens again, in one forward pass over the whole sequence. This
compares the two, token by token: for streams that decode alone, in a batch, with prompts in chunks, and with
prompts from the prefix cache; for the bundled demo model and for a model with experts and random weights, or
for the model in DIR. Prints a table for docs/rl.md. Its last columns say what to compare with: transformers
against itself with its own cache, and against itself in float32.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers import DynamicCache

import penstock
from penstock.config.serve import ServeConfig
from penstock.engine.torch.engine import TorchEngine
from penstock.engine.torch.supported_models import WITH_EXPERTS
from penstock.wire.messages import SamplingParams, Submit

DEMO_DIR = Path(penstock.__file__).parent / "demo"
DTYPES = "float32", "bfloat16", "float16"
QUESTIONS = (Path(__file__).parent / "demo_dialogues.txt").read_text().split("\nQ: ")[1:]
CHUNK = 32
"""Tokens of a step in which prompts come in chunks."""
EXPERTS: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
}
"""A Qwen3 with experts, whose next tokens are neither certain nor all alike."""


@dataclass
class Stream:
    """A prompt, what was sampled after it, and logprobs: of the output, and of the prompt from its second
    token on."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Differences:
    """Largest absolute differences of one model, dtype and ``--batch-invariant``, in nats.

    ``own_cache``: transformers with its cache, token by token, against its pass over the whole sequence;
    ``rounding``: this pass against the same in float32.
    """

    dtype: str
    batch_invariant: bool
    alone: float
    batch: float
    chunks: float
    cached: float
    prompts: float
    own_cache: float
    rounding: float


# -- Penstock


def run(
    engine: TorchEngine, prompts: Sequence[list[int]], tokens: int, *, score_prompts: bool = False
) -> list[Stream]:
    """Sample ``tokens`` after each prompt, all of them at once. ``score_prompts``: with the logprobs of the
    prompts, which then do not come from the prefix cache."""
    streams = [Stream(prompt) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(
            tokens, number, logprobs=0, prompt_logprobs=0 if score_prompts else -1, ignore_eos=True
        )
        engine.submit(0, Submit(number, np.array(prompt, "<i4").tobytes(), sampling))
    while engine.has_work():
        rows = engine.step()
        assert not rows.failed, rows.failed
        if rows.prompt is not None:
            for row, value in zip(rows.prompt.row.tolist(), rows.prompt.values[:, 0].tolist(), strict=True):
                streams[int(rows.stream[row])].prompt_logprobs.append(value)
        if rows.logprobs is not None:  # a row has one token
            scored = rows.logprobs
            owners = rows.stream[rows.count != 0] if rows.count is not None else rows.stream
            for at, id, value in zip(scored.token, scored.ids[:, 0], scored.values[:, 0], strict=True):
                streams[int(owners[at])].tokens.append(int(id))
                streams[int(owners[at])].logprobs.append(float(value))
    return streams


def make_engine(
    directory: str, dtype: str, *, batch_invariant: bool, streams: int, chunks: bool
) -> TorchEngine:
    config = ServeConfig(
        dtype=dtype,
        device="cpu",
        batch_invariant=batch_invariant,
        max_num_seqs=streams,
        max_num_batched_tokens=max(CHUNK, streams) if chunks else 2048,
        kv_cache_memory=256 << 20,
        enable_prefix_caching=True,
    )
    return TorchEngine(config, directory, lambda text, fraction: None)


# -- transformers


def load(directory: str, dtype: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), local_files_only=True
    )
    return model.eval()


@torch.inference_mode()
def forward(model: Any, sequence: Sequence[int]) -> list[float]:
    """Logprobs of all tokens but the first, in one pass, as a trainer computes them."""
    ids = torch.tensor([list(sequence)])
    raw = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
    found: list[float] = raw.gather(-1, ids[0, 1:, None])[:, 0].tolist()
    return found


@torch.inference_mode()
def step_by_step(model: Any, stream: Stream) -> list[float]:
    """Logprobs of the output with transformers' own cache: the prompt in one pass, then single tokens."""
    cache, ids, found = DynamicCache(), torch.tensor([stream.prompt]), []
    for token in stream.tokens:
        logits = model(ids, past_key_values=cache, use_cache=True).logits[0, -1].float()
        found.append(float(torch.log_softmax(logits, -1)[token]))
        ids = torch.tensor([[token]])
    return found


# -- the comparison


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    return float(np.abs(np.array(one) - np.array(other)).max(initial=0.0))


def difference(model: Any, streams: Sequence[Stream]) -> float:
    """Of the outputs' logprobs, to one forward pass over each sequence."""
    return max(
        largest(each.logprobs, forward(model, each.prompt + each.tokens)[len(each.prompt) - 1 :])
        for each in streams
    )


def compare(
    directory: str, dtype: str, prompts: Sequence[list[int]], tokens: int, *, batch_invariant: bool
) -> Differences:
    """All ways in which a stream's tokens are computed, against transformers in the same dtype."""
    model, exact = load(directory, dtype), load(directory, "float32")
    options: dict[str, Any] = {"batch_invariant": batch_invariant, "streams": len(prompts)}
    whole = make_engine(directory, dtype, chunks=False, **options)
    alone = [run(whole, [prompt], tokens)[0] for prompt in prompts[:4]]
    whole.call("reset_prefix_cache", {})
    batch = run(whole, prompts, tokens)
    hits = whole.metrics()["prefix_cache_hits_total"]
    cached = run(whole, prompts, tokens)
    assert whole.metrics()["prefix_cache_hits_total"] > hits, "no prompt was found in the prefix cache"
    cut = make_engine(directory, dtype, chunks=True, **options)
    chunks = run(cut, prompts, tokens, score_prompts=True)
    return Differences(
        dtype=dtype,
        batch_invariant=batch_invariant,
        alone=difference(model, alone),
        batch=difference(model, batch),
        chunks=difference(model, chunks),
        cached=difference(model, cached),
        prompts=max(largest(each.prompt_logprobs, forward(model, each.prompt)) for each in chunks),
        own_cache=max(
            largest(
                step_by_step(model, each), forward(model, each.prompt + each.tokens)[len(each.prompt) - 1 :]
            )
            for each in batch
        ),
        rounding=max(
            largest(*(forward(one, each.prompt + each.tokens) for one in (model, exact))) for each in batch
        ),
    )


def demo_prompts(directory: str, count: int) -> list[list[int]]:
    """Prompts of 20 to 200 tokens, without a common beginning."""
    tokenizer = Tokenizer.from_file(str(Path(directory, "tokenizer.json")))
    text = [tokenizer.encode("Q: " + each).ids for each in QUESTIONS]
    return [(each * 4)[: 20 + 180 * number // count] for number, each in enumerate(text[:count])]


def random_prompts(vocab: int, count: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(5, vocab, 20 + 180 * number // count).tolist() for number in range(count)]


def write_experts(directory: str, **changes: Any) -> None:
    """A model with experts whose weights are drawn at random, in float32."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**(EXPERTS | changes))
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def measured(
    name: str, directory: str, prompts: Sequence[list[int]], tokens: int, dtypes: Sequence[str]
) -> Iterator[tuple[str, Differences]]:
    kind = transformers.AutoConfig.from_pretrained(directory, local_files_only=True).model_type
    for dtype in dtypes:
        for batch_invariant in (False, True) if kind not in WITH_EXPERTS else (False,):
            print(f"{name}, {dtype}, batch-invariant {batch_invariant}", file=sys.stderr, flush=True)
            yield name, compare(directory, dtype, prompts, tokens, batch_invariant=batch_invariant)


COLUMNS: tuple[tuple[str, Callable[[Differences], float]], ...] = (
    ("alone", lambda each: each.alone),
    ("in a batch", lambda each: each.batch),
    ("prompts in chunks", lambda each: each.chunks),
    ("cached prompts", lambda each: each.cached),
    ("prompt tokens", lambda each: each.prompts),
    ("transformers' own cache", lambda each: each.own_cache),
    ("transformers to float32", lambda each: each.rounding),
)


def render(found: Sequence[tuple[str, Differences]]) -> str:
    """A Markdown table."""
    lines = [f"| model | dtype | `--batch-invariant` | {' | '.join(name for name, _ in COLUMNS)} |"]
    lines.append("| --- " * (3 + len(COLUMNS)) + "|")
    for name, each in found:
        values = [f"{value(each):.2g}" for _, value in COLUMNS]
        lines.append(
            f"| {name} | {each.dtype} | {'on' if each.batch_invariant else 'off'} | {' | '.join(values)} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="directory of a model; default: the demo model, and one with experts")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--streams", type=int, default=16, choices=range(1, 257), metavar="1 to 256")
    parser.add_argument("--tokens", type=int, default=48, choices=range(1, 513), metavar="1 to 512")
    options = parser.parse_args(arguments)
    found: list[tuple[str, Differences]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        if options.model is None:
            write_experts(directory)
            models = [("demo", str(DEMO_DIR)), ("experts", directory)]
        else:
            models = [(Path(options.model).name, options.model)]
        for name, path in models:
            vocab = transformers.AutoConfig.from_pretrained(path, local_files_only=True).vocab_size
            prompts = (
                demo_prompts(path, options.streams)
                if name == "demo"
                else random_prompts(vocab, options.streams)
            )
            found += measured(name, path, prompts, options.tokens, options.dtypes)
    print(render(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
