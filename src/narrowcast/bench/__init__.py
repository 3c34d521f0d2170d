"""`narrowcast bench`: this library and its peers, measured side by side on this machine.

Each contender runs in its own process, because some change torch for the whole process.
"""
