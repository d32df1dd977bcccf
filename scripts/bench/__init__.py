"""Measurements of parts of Penstock, for whoever changes them: ``python -m scripts.bench.NAME --help``.

``penstock bench`` measures what runs on a machine: a server, an engine's host work, a gateway.
"""
