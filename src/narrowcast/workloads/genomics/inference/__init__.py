"""Use finished runs: predict, score variants, generate sequences."""
