"""Vectors, scores and labels by vLLM's engines."""
