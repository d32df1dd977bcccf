"""Sampling of logits on the device: constraints, penalties, drawing a token."""
