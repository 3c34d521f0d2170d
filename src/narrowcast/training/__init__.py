"""Training: a task, its data in a fixed order, steps as records, exact checkpoints."""
