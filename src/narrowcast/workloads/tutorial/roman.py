"""Roman numerals."""

SIGNS = {"M": 1000, "CM": 900, "D": 500, "CD": 400, "C": 100, "XC": 90, "L": 50, "XL": 40, "X": 10}
SIGNS |= {"IX": 9, "V": 5, "IV": 4, "I": 1}


def roman(number: int) -> str:
    """Return a number from 1 to 3999 as a Roman numeral."""
    text = ""
    for sign, value in SIGNS.items():
        text, number = text + sign * (number // value), number % value
    return text
