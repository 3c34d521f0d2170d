"""Linear layers with native fp8 products, and where their scales come from."""
