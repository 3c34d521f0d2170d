"""Sequences with what is to be predicted of them: read or made, cut, split, and batched."""
