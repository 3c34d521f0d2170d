"""Ways to train that decide, step by step, what a step is."""
