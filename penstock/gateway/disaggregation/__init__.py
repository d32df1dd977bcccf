"""Prefill/decode disaggregation: one endpoint computes the prompt, another one the output."""
