"""KV cache events: a record of what the prefix cache gains and loses, and its publisher."""
