"""One module per kind of optimizer: `build(weights, **options)` returns its update, to be timed."""
