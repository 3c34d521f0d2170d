"""`bench models`: models that people know, or one's own, trained in every way there is.

`models` builds them, `ways` takes a training step of one, `subject` is a worker's side of a
measurement, `running` has one after another measured, `kept` is the file of what was, `bars` says
what is asked of the figures.
"""
