"""Processes on the machines of a Ray cluster. Only processes started for that import Ray."""
