"""What statistics and loss scales mean: one rule a trouble, told when it begins."""
