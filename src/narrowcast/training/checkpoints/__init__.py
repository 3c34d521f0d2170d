"""Checkpoints: the whole state of a run, written, read, compared and taken up again."""
