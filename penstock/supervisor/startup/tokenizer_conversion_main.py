"""Converts a tokenizer to tokenizer.json: ``python -m <this module> SOURCE TARGET``.

A separate process, because importing transformers takes seconds and hundreds of megabytes.
"""

from __future__ import annotations

import sys


def convert(source: str, target: str) -> None:
    """Convert the tokenizer in directory ``source`` and write it to directory ``target``."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, use_fast=True, trust_remote_code=False).save_pretrained(target)


if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2])
