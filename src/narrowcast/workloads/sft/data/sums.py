"""Sums to learn, for a first run that needs no file."""

from collections.abc import Iterator

from narrowcast.workloads.sft.data.rows import Row

LARGEST = 9
"""Of the two numbers of a sum."""
QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Add up {a} and {b}.",
    "Compute {a} + {b}.",
    "Tell me {a} plus {b}.",
    "{a} + {b} = ?",
    "What do {a} and {b} make?",
)
"""Ten ways to ask: what is held out for validation is a new question about a known sum."""


def sums() -> Iterator[Row]:
    """Yield every sum of two digits in every wording, as a question with its answer."""
    numbers = range(LARGEST + 1)
    requested = ((a, b, text) for a in numbers for b in numbers for text in QUESTIONS)
    for number, (a, b, text) in enumerate(requested, 1):
        values = {"question": text.format(a=a, b=b), "answer": f"{a} + {b} = {a + b}"}
        yield Row(values, f"sums, row {number}")
