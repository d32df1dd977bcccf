"""Engines of vLLM: headless engine processes of ``vllm serve``, attached over their own wire protocol."""
