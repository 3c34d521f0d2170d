"""Checkpoints: the whole state of a run, saved, loaded, compared and resumed."""
