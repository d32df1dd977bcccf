"""Makes a tokenizer.json where a model has none: ``python -m <this module> SOURCE TARGET``.

A program of its own, because transformers takes seconds and hundreds of megabytes to import.
"""

from __future__ import annotations

import sys


def convert(source: str, target: str) -> None:
    """Writes the fast form of the tokenizer in directory ``source`` to directory ``target``."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source, use_fast=True, trust_remote_code=False).save_pretrained(target)


if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2])
