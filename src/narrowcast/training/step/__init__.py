"""One step of a run: its passes, its loss, and its numbers on their way to the host."""
