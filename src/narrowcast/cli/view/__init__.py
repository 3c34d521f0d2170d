"""What verbs print: tables, progress and summaries."""
