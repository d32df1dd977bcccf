"""Trains the demo model that ships in `penstock/demo/`: a Llama of about 3.5 million parameters.

    python scripts/train_demo.py --docs DOCS --minutes 48 --output /tmp/demo
    python scripts/train_demo.py --docs DOCS --minutes 12 --rate 1e-3 --finish /tmp/demo --output OUTPUT

The first run learns the language from all the text and keeps the state with the lowest validation loss. The
second starts from there and goes again over what people ask first, which a model of this size otherwise
does not keep by heart, and over tool calls; the result is a weighted mean of the two (`--blend`), which keeps
most of both. A finishing run may be repeated on its own result.

Needs the `torch` extra and one CPU core. `--docs` names Python's HTML documentation (the Debian package
python3.11-doc unpacks it to /usr/share/doc/python3.11/html; or "HTML" from
https://docs.python.org/3.11/download.html); without it the model learns from docstrings and `pydoc` topics
only. Data, initial weights and the order of the batches follow from `--seed`; how many steps fit into
`--minutes` depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from demo_corpus import Corpus, build
from demo_data import (
    BEGIN,
    CHAT_TEMPLATE,
    END,
    IGNORED,
    IM_END,
    IM_START,
    PAD,
    PHASES,
    VALIDATION_ROWS,
    VOCABULARY,
    Data,
    token_id,
    train_tokenizer,
)
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

MAX_POSITIONS = 2048
"""Positions the configuration allows; training shows fewer, see `PHASES`."""


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The untrained model, float32."""
    begin, end, pad = (token_id(tokenizer, token) for token in (BEGIN, END, PAD))
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=begin,
        eos_token_id=end,
        pad_token_id=pad,
    )
    return LlamaForCausalLM(config)


def optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms; `rate` is the peak of both."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_at(progress: float) -> float:
    """Share of the peak learning rate: 2 % warm-up, then a cosine down to 2 %."""
    if progress < 0.02:
        return max(progress / 0.02, 0.02)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def loss_of(model: LlamaForCausalLM, compiled: bool) -> Loss:
    """Mean cross entropy of (inputs, labels), computed in bfloat16 where autocast allows."""

    def loss(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )

    return torch.compile(loss, dynamic=False) if compiled else loss


@torch.no_grad()
def validation_loss(loss: Loss, data: Data) -> float:
    """Mean loss in nats per token over the held-out documents."""
    rows = torch.arange(len(data.held_out.rows))
    parts = [part for part in torch.split(rows, VALIDATION_ROWS) if len(part) == VALIDATION_ROWS]
    return sum(float(loss(*data.held_out.batch(part))) for part in parts) / len(parts)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes weights (bfloat16), configuration, tokenizer and chat template in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, end, im_end, pad = (token_id(tokenizer, token) for token in (BEGIN, END, IM_END, PAD))
    stored = LlamaForCausalLM(model.config)
    stored.load_state_dict(model.state_dict())
    stored = stored.to(torch.bfloat16)
    stored.generation_config = GenerationConfig(
        bos_token_id=begin,
        eos_token_id=[end, im_end],
        pad_token_id=pad,
        do_sample=True,
        temperature=0.4,
        top_p=0.9,
    )
    stored.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [IM_START, IM_END],
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def prepare(corpus: Corpus, finish: Path | None) -> tuple[Tokenizer, LlamaForCausalLM]:
    """Tokenizer and model (float32) to begin with: new ones, or those of the folder `finish`."""
    if finish is not None:
        model = LlamaForCausalLM.from_pretrained(finish, dtype=torch.float32)
        return Tokenizer.from_file(str(finish / "tokenizer.json")), model
    replies = [f"{question}\n{answer.reply}" for answer in corpus.small_talk for question in answer.questions]
    tokenizer = train_tokenizer(corpus.documents + replies)
    return tokenizer, new_model(tokenizer)


def train(arguments: argparse.Namespace) -> None:
    """The whole run; prints one line per `--log-every` steps."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    corpus = build(arguments.docs)
    tokenizer, model = prepare(corpus, arguments.finish)
    data = Data(corpus, tokenizer, arguments.seed, finish=arguments.finish is not None)
    loss = loss_of(model, arguments.compile)
    steppers = optimizers(model, arguments.rate)
    characters, count = sum(map(len, corpus.documents)), sum(map(len, data.documents))
    print(f"{characters:,} characters, {count:,} tokens, {model.num_parameters():,} parameters", flush=True)
    start = time.monotonic()
    best, saved_at, tokens = math.inf, 0.0, 0

    def minutes() -> float:
        return (time.monotonic() - start) / 60

    def progress() -> float:
        return minutes() / float(arguments.minutes)

    for step, (inputs, labels) in enumerate(data.batches(arguments.batch, progress)):
        value = loss(inputs, labels)
        torch.autograd.backward(value)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(steppers, arguments.rate * rate_at(progress()))
        tokens += inputs.numel()
        if step % arguments.log_every == 0:
            print(f"step {step} min {minutes():.1f} tokens {tokens:,} loss {value.item():.3f}", flush=True)
        if minutes() - saved_at >= arguments.save_every:
            saved_at = minutes()
            best = keep_best(model, tokenizer, validation_loss(loss, data), best, arguments.output)
    if arguments.finish is not None:
        blend(model, prepare(corpus, arguments.finish)[1], arguments.blend)
        best = math.inf
    keep_best(model, tokenizer, validation_loss(loss, data), best, arguments.output)


@torch.no_grad()
def blend(model: LlamaForCausalLM, start: LlamaForCausalLM, share: float) -> None:
    """Sets the weights of `model` to `share` of its own plus the rest of those of `start`."""
    for parameter, before in zip(model.parameters(), start.parameters(), strict=True):
        parameter.lerp_(before, 1 - share)


def update(steppers: list[torch.optim.Optimizer], rate: float) -> None:
    """One step of every optimizer at this learning rate; clears the gradients."""
    for stepper in steppers:
        for group in stepper.param_groups:
            group["lr"] = rate
        stepper.step()
        stepper.zero_grad(set_to_none=True)


def keep_best(
    model: LlamaForCausalLM, tokenizer: Tokenizer, held_out: float, best: float, folder: Path
) -> float:
    """Saves the model if its validation loss `held_out` is below `best`; returns the lower of the two."""
    print(f"validation loss {held_out:.4f}", flush=True)
    if held_out < best:
        save(model, tokenizer, folder)
    return min(held_out, best)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--docs", type=Path, help="folder of Python's HTML documentation (holds library/)")
    add(
        "--output",
        type=Path,
        required=True,
        help="where the best model so far (with --finish: the last one) is written",
    )
    add("--finish", type=Path, help="folder of a trained model: go over the familiar part of the text again")
    add(
        "--blend",
        type=float,
        default=0.7,
        help="with --finish: share of the last state in the result, 0 to 1",
    )
    add("--minutes", type=float, default=50.0, help="training time; the learning rate follows it")
    add("--threads", type=int, default=1, help="CPU threads of torch")
    add("--seed", type=int, default=0, help="seed of weights, wording and order")
    add("--batch", type=int, default=8192, help="tokens per step")
    add("--rate", type=float, default=3e-3, help="peak learning rate")
    add("--save-every", type=float, default=5.0, help="minutes between validations")
    add("--log-every", type=int, default=20, help="steps between log lines")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    arguments = parser.parse_args()
    if arguments.docs is not None and not (arguments.docs / "library").is_dir():
        parser.error(f"--docs {arguments.docs}: holds no folder named library")
    if arguments.finish is not None and not (arguments.finish / "model.safetensors").is_file():
        parser.error(f"--finish {arguments.finish}: holds no model.safetensors")
    if not 0 <= arguments.blend <= 1:
        parser.error(f"--blend {arguments.blend}: must be between 0 and 1")
    for name in ("minutes", "threads", "rate", "save_every", "log_every"):
        if vars(arguments)[name] <= 0:
            parser.error(f"--{name.replace('_', '-')} {vars(arguments)[name]}: must be above 0")
    longest = max(window for _, window in PHASES)
    if arguments.batch < longest:
        parser.error(f"--batch {arguments.batch}: must be at least {longest}, the longest sequence")
    return arguments


if __name__ == "__main__":
    train(parse_arguments())
