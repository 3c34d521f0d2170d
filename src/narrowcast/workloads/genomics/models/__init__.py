"""Models of sequences: long convolutions, attention, plain convolutions; of letters or patches."""
