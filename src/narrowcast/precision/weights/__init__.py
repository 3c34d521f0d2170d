"""Weights: the ones a run trains, what is kept beside them, and how an update moves them."""
