"""Control of hybrid training: when to predict, how surely, and when to stop."""
