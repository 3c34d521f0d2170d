"""Models of transformers: load, adapt and save."""
