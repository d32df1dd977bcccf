"""What operators of other servers write: flags and variables of vLLM and SGLang, and what they are here."""
