"""Models of transformers: found, made, given adapters, and saved as others load them."""
