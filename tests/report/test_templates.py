"""The style sheet keeps WCAG's contrast in both schemes: 4.5 to 1 for text, 3 to 1 for lines."""

import re
from importlib.resources import files

import pytest

STYLE = files("narrowcast.report").joinpath("templates", "style.css").read_text(encoding="utf-8")


def colours(scheme: str) -> dict[str, str]:
    light, dark = re.findall(r":root[^{]*\{([^}]*)\}", STYLE)
    found = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", light))
    return found | (
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", dark)) if scheme == "dark" else {}
    )


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


TEXT = [
    *[(ink, paper) for ink in ("ink", "quiet") for paper in ("paper", "raised", "sunk")],
    ("series", "raised"),
    *[(tone, f"{tone}-paper") for tone in ("good", "fair", "bad")],
    *[(family, f"{family}-paper") for family in ("full", "half", "eight", "four")],
]
LINES = [(line, "paper") for line in ("series", "evaluated", "skipped", "good")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("ink", "paper"), TEXT)
def test_text_stands_out_from_its_ground(scheme, ink, paper):
    found = colours(scheme)
    assert contrast(found[ink], found[paper]) >= 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("line", "paper"), LINES)
def test_lines_and_marks_stand_out_from_the_paper(scheme, line, paper):
    found = colours(scheme)
    assert contrast(found[line], found[paper]) >= 3


def test_dark_redefines_every_colour_of_light():
    light, dark = re.findall(r":root[^{]*\{([^}]*)\}", STYLE)
    assert re.findall(r"--[a-z-]+", light) == re.findall(r"--[a-z-]+", dark)


def test_no_colour_is_written_outside_the_two_palettes():
    rest = re.sub(r":root[^{]*\{[^}]*\}", "", STYLE)
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b|rgba?\(|hsla?\(", rest) == []
