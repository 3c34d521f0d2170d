"""How a decomposition is judged: against what is known of the target, and by what it costs."""
