"""Sums to learn, for a first run that needs no file."""

from collections.abc import Iterator

from narrowcast.workloads.sft.data.rows import Row

LARGEST = 49
"""Of the two numbers of a sum."""


def sums() -> Iterator[Row]:
    """Yield every sum of two numbers once, as a question with its answer."""
    pairs = ((a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1))
    for number, (a, b) in enumerate(pairs, 1):
        values = {"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}"}
        yield Row(values, f"sums, row {number}")
