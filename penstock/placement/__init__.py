"""Engines on the machines of a Ray cluster. Only the processes started for them import Ray."""
