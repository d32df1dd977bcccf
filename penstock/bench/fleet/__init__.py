"""Simulates a fleet of model servers, to compare ways of choosing among them."""
