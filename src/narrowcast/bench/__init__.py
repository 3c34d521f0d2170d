"""`narrowcast bench`: this machine, this library and its peers, measured side by side.

Each contender runs in a process of its own (`worker`), because some of them change torch for the
whole process. A coordinator starts them, lets them compile at the same time, and measures them
one at a time, in turns. Nothing here prints: progress goes to a callback, figures come back.
"""
