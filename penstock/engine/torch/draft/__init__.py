"""Draft models of speculative decoding."""
