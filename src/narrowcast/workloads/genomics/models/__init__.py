"""Models of sequences: long convolutions, attention and plain convolutions, over letters or patches."""
