"""What ``vllm serve --headless`` is to a server that starts it: a command, an engine process below it that
makes tokens on a clock, and lines of log.

``python fake_vllm.py serve MODEL --headless … [--fail TEXT]``
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from penstock.engine.vocabulary import read_vocab_size
from penstock.supervisor.startup.model_resolution import DEMO_DIR


def main() -> int:
    """Run as the first argument says; returns the exit code."""
    parser = argparse.ArgumentParser(prog="vllm serve")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--headless", action="store_true", required=True)
    parser.add_argument("--data-parallel-address", required=True)
    parser.add_argument("--data-parallel-rpc-port", required=True)
    parser.add_argument("--max-num-seqs", required=True)
    parser.add_argument("--step-ms", default="5")
    parser.add_argument("--fail")
    given = parser.parse_args()
    print("(ApiServer pid=1) INFO 11-28 18:00:00 [serve.py:1] loading the model", flush=True)
    if given.fail is not None:
        print(f"(EngineCore pid=2) ERROR 11-28 18:00:01 [core.py:2] {given.fail}", flush=True)
        return 1
    command = [sys.executable, "-m", "penstock.bench.clock.engine"]
    command += [given.data_parallel_address, given.data_parallel_rpc_port]
    command += ["--max-num-seqs", given.max_num_seqs, "--step-ms", given.step_ms]
    return subprocess.run([*command, "--vocab-size", str(read_vocab_size(DEMO_DIR))]).returncode


if __name__ == "__main__":
    sys.exit(main())
