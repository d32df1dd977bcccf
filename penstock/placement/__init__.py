"""Processes on the machines of a Ray cluster. Only those started for them import Ray."""
