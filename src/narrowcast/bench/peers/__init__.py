"""One module per peer: `build(bench, **options)` returns its training step, ready to be timed."""
