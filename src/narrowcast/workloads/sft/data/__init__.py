"""Data to fine-tune on: rows of files become conversations, conversations become tokens."""
