"""Pieces of a model that can be computed as one: what each is known by."""
