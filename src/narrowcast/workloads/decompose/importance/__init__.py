"""Causal importance: how much of each component a position needs, and the masks made of it."""
