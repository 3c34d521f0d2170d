"""`bench models`: well-known models, or the user's own, trained in several ways."""
