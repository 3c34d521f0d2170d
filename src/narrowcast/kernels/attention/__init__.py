"""Attention over rows that hold several sequences, each of which sees only itself."""
