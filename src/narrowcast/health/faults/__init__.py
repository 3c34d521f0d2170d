"""Faults put into a run on purpose."""
