"""Networks and ablations shown: as text, as drawings of SVG, as a page, in the report of a run."""
