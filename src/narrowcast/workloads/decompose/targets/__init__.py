"""Trained networks that are decomposed: toys, trained on the spot, and language models."""
