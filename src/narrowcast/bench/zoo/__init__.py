"""`bench models`: well-known models, or the user's own, trained in several ways.

`models` builds them, `ways` makes a training step, `subject` is a worker's side of a measurement,
`running` measures row after row, `saved_rows` is the file of rows.
"""
