"""What is done with a finished run: predictions, scores of variants, and sequences it writes."""
