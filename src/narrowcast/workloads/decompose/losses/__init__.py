"""What a decomposition is trained to: terms of a loss, each a number for every seed."""
