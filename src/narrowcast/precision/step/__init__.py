"""The step: a prepared model, what happens to it between two batches, and what the host learns."""
