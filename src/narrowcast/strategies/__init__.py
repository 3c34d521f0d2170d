"""Ways to train with fewer steps, for any recipe."""
