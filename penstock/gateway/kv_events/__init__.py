"""Which endpoint has the beginning of a prompt in its KV cache, by the events that endpoints publish."""
