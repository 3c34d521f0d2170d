"""How long, how much memory, how good: from steps to figures."""
