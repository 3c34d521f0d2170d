"""Time series: read, check, fill, split."""
