"""The encoders that the torch engine runs. Imports no torch, for the supervisor to check them."""

from __future__ import annotations

SUPPORTED_ENCODERS: dict[str, str] = {
    "albert": "ALBERT",
    "bert": "BERT, MiniLM, BGE, E5, GTE and other models of this architecture",
    "camembert": "CamemBERT",
    "distilbert": "DistilBERT",
    "electra": "ELECTRA",
    "modernbert": "ModernBERT, GTE ModernBERT",
    "mpnet": "MPNet",
    "nomic_bert": "Nomic Embed",
    "roberta": "RoBERTa",
    "xlm-roberta": "XLM-RoBERTa, BGE M3, multilingual E5",
}
"""model_type of config.json, and the models that have it. Tests compare each one's vectors with those of
transformers."""

OFFSET_POSITIONS = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"})
"""model_types whose positions begin after that of the padding token: so many fewer tokens are taken."""

BIDIRECTIONAL = ("gemma3_text",)
"""model_types of decoders whose config.json may say that tokens attend to those behind them."""
