"""Text to token ids and back for the API server."""

import os

import tokenizers


class Tokenizer:
    """A model's tokenizer: exact ids, by the fastest encoder that proves exact."""

    raw: tokenizers.Tokenizer
    """The reference implementation; what decoding tables are built from."""
    vocab_size: int
    """Ids run from 0 to vocab_size - 1, added tokens included."""
    special_ids: frozenset[int]
    releases_gil: bool
    """Whether encoding in a thread lets the event loop run meanwhile."""

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "Tokenizer":
        """From ``tokenizer.json`` in ``directory``. Raises ValueError naming what is wrong with it."""
        raise NotImplementedError

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        raise NotImplementedError

    def encode_bytes(self, text: str, add_special_tokens: bool = True) -> tuple[bytes, int]:
        """Token ids as little-endian int32 bytes, and their count: what Submit.prompt takes."""
        raise NotImplementedError

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        raise NotImplementedError

    def token_strings(self, ids: list[int]) -> list[str]:
        """The vocabulary's own spelling of each id."""
        raise NotImplementedError
