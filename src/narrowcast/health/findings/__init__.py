"""What statistics and loss scales mean: one rule per issue, reported when it begins."""
