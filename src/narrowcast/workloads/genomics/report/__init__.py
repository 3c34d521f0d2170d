"""Report sections of a genomics run, as HTML and SVG."""
