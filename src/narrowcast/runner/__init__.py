"""A run as a library function: from a recipe to records, without a command line."""
