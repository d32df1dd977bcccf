"""A small tokenizer for random models: every byte, and a few longer tokens."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<s>", "</s>", "<pad>")
MERGES = ("tr", "tru", "true", "fa", "al", "se", '":', "no", "ye", "yes", "ab", "abc", "00", "Ġ{")


def make_tokenizer(directory: Path) -> Tokenizer:
    """Saved to ``directory``/tokenizer.json: ids 0 to 2 are special (1: EOS), 3 to 258 bytes, then merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*SPECIAL, *alphabet, *MERGES]
    merges = [(text[:-1], text[-1]) for text in MERGES]
    model = models.BPE(vocab={text: place for place, text in enumerate(texts)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer
