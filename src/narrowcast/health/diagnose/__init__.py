"""Why a step went wrong: replay it, and name the first number that was not finite."""
