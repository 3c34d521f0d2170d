"""What a run returns: its weights, or an average of them that a held-out measure likes better."""
