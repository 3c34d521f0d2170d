"""Networks and ablations as text, as SVG, as a page, and as sections of a run's report."""
