"""`narrowcast bench`: this library and its peers, measured side by side on this machine.

Each contender runs in its own process (`worker`), because some change torch for the whole process.
`rounds` times the contenders of `bench step` in turns, `zoo` the rows of `bench models`. Nothing
here prints: progress goes to a callback, figures are returned.
"""
