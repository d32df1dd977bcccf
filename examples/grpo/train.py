"""GRPO on a running `penstock serve`: rollouts as columns, weights through shared memory, one update a step.

    python examples/grpo/train.py [--url http://localhost:8000] [--steps 12] [--seed 0]

The demo model learns to write tokens with an "e". Each step

1. writes the policy to a file in shared memory and has the server's engines compute with it;
2. samples groups of outputs, token ids in and out, and checks that these weights made every token;
3. makes one step of gradient descent on them, with the server's logprobs as those of the old policy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from safetensors.torch import load, save_file
from tokenizers import Tokenizer

import penstock

DEMO = Path(penstock.__file__).parent / "demo"
SHARED_MEMORY = Path("/dev/shm")
PROMPTS = [
    "The list of",
    "This function returns",
    "A dictionary is",
    "Return the value of",
    "In Python, a class",
    "If the file does not",
    "A string that",
    "When an object is",
]
LETTER = "e"
MAX_TOKENS = 16
CLIP = 0.2
"""How far a token's probability may move from the old policy's, relatively, before it adds nothing."""
LEARNING_RATE = 2e-4


@dataclass
class Rollouts:
    """Streams of one step, padded at their ends to L tokens."""

    token_ids: torch.Tensor  # int64 [streams, L]: prompts and outputs
    sampled: torch.Tensor  # bool [streams, L]: which of them the server has sampled
    logprobs: torch.Tensor  # float32 [streams, L]: the server's, of those; 0 elsewhere
    rewards: torch.Tensor  # float32 [groups, streams per group]


class Policy:
    """The model in training."""

    def __init__(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, weight_decay=0.0)

    def learn(self, rollouts: Rollouts) -> tuple[float, float]:
        """Make one step. Returns how far the policy was from the server's before: the largest difference of
        a token's logprob, and the mean estimate of the KL divergence, in nats."""
        groups = rollouts.rewards
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        logits = self.model(rollouts.token_ids[:, :-1]).logits
        targets = rollouts.token_ids[:, 1:, None]
        logprobs = logits.log_softmax(-1).gather(-1, targets).squeeze(-1)
        sampled = rollouts.sampled[:, 1:]
        log_ratio = (logprobs - rollouts.logprobs[:, 1:])[sampled]
        ratio = log_ratio.exp()
        advantage = advantages.view(-1, 1).expand_as(sampled)[sampled]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        # By a constant, not by each output's length: short outputs must not weigh more.
        loss = -gain.sum() / (groups.numel() * MAX_TOKENS)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        return log_ratio.abs().max().item(), (ratio - 1 - log_ratio).mean().item()


class Sampler:
    """The server: its weights, and outputs of them."""

    def __init__(self, url: str, shared: Path) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        # An engine that restarts reads the latest file again, so it stays while the next one is written.
        self._files = itertools.cycle([shared / "even.safetensors", shared / "odd.safetensors"])
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        self._prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
        texts = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
        self._wanted = torch.tensor([LETTER in text for text in texts])

    def close(self) -> None:
        self._pool.shutdown()
        self._http.close()

    def update(self, model: torch.nn.Module, version: str, path: Path | None = None) -> float:
        """Have all engines compute with these weights, from a file in shared memory or at ``path``. Returns
        the seconds from the written file to the last engine's receipt."""
        path = path or next(self._files)
        save_file({name: weights.data for name, weights in model.named_parameters()}, path)
        began = time.perf_counter()
        reply = self._http.post("/update_weights", json={"path": str(path), "weight_version": version})
        if reply.status_code != 200:
            raise RuntimeError(f"the weights {version} were not taken: {reply.text}")
        return time.perf_counter() - began

    def sample(self, group: int, seed: int, version: str) -> Rollouts:
        """``group`` outputs of every prompt, by the weights ``version`` and no others."""
        sampling = {"n": group, "max_tokens": MAX_TOKENS, "logprobs": 0}
        bodies = [
            {"token_ids": prompt, "sampling_params": sampling | {"seed": seed + index}}
            for index, prompt in enumerate(self._prompts)
        ]
        replies = list(self._pool.map(self._generate, bodies))
        longest = max(map(len, self._prompts)) + MAX_TOKENS
        streams = len(bodies) * group
        token_ids = torch.zeros(streams, longest, dtype=torch.int64)
        sampled = torch.zeros(streams, longest, dtype=torch.bool)
        logprobs = torch.zeros(streams, longest)
        rewards = torch.zeros(streams)
        for number, (prompt, (columns, facts)) in enumerate(zip(self._prompts, replies, strict=True)):
            for choice, (start, end) in enumerate(itertools.pairwise(columns["offsets"].tolist())):
                versions = {span["version"] for span in facts["choices"][choice]["weight_versions"]}
                if versions != {version}:
                    raise RuntimeError(f"tokens of the weights {version} are of {versions}")
                stream, first, last = number * group + choice, len(prompt), len(prompt) + end - start
                output = columns["token_ids"][start:end].long()
                token_ids[stream, :first] = torch.tensor(prompt)
                token_ids[stream, first:last] = output
                sampled[stream, first:last] = True
                logprobs[stream, first:last] = columns["logprobs"][start:end]
                rewards[stream] = self._wanted[output].sum() / MAX_TOKENS
        return Rollouts(token_ids, sampled, logprobs, rewards.view(len(bodies), group))

    def _generate(self, body: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The columns of a reply, and what its header says."""
        accept = {"Accept": "application/vnd.safetensors"}
        data = self._http.post("/inference/v1/generate", json=body, headers=accept).raise_for_status().content
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return load(data), {name: json.loads(text) for name, text in header["__metadata__"].items()}


def train(url: str, steps: int, group: int, seed: int, output: Path) -> None:
    policy = Policy()
    shared = Path(tempfile.mkdtemp(prefix="grpo-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None))
    sampler = Sampler(url, shared)
    updated = 0.0
    try:
        print(f"weights in {shared}", flush=True)
        for step in range(steps):
            version = f"{shared.name}-{step}"
            updated = sampler.update(policy.model, version)
            began = time.perf_counter()
            rollouts = sampler.sample(group, seed * 1_000_000 + step * len(PROMPTS), version)
            sampled = time.perf_counter()
            difference, divergence = policy.learn(rollouts)
            print(
                f"step {step}  reward {rollouts.rewards.mean():.3f}  update {updated * 1e3:.0f} ms  "
                f"rollouts {sampled - began:.2f} s  learning {time.perf_counter() - sampled:.2f} s  "
                f"logprobs differ by {difference:.1e}  KL {divergence:.1e}",
                flush=True,
            )
    finally:
        try:  # Files in shared memory go; the server goes on with one that stays.
            if updated:
                sampler.update(policy.model, f"{shared.name}-last", output.absolute())
                print(f"{output} has the weights {shared.name}-last", flush=True)
        finally:
            sampler.close()
            shutil.rmtree(shared)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--group", type=int, default=16, help="outputs per prompt and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("grpo.safetensors"), help="the trained weights")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: files are removed
    try:
        train(options.url, options.steps, options.group, options.seed, options.output)
    except (httpx.HTTPError, RuntimeError) as error:
        sys.exit(f"{options.url}: {error}")
