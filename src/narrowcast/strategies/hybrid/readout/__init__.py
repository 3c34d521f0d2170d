"""The weights that a run returns: trained, or the average with the best held-out metric."""
