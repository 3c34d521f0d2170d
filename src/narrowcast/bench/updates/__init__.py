"""One module a kind of optimizer: `build(weights, **options)` returns its update, to be timed."""
