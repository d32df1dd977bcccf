"""An engine that speaks vLLM's wire and makes tokens on a clock, for measurements of front ends."""
