from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.sources import read_rows
from narrowcast.workloads.sft.judge.exact_match import (
    comparison_kind,
    is_right,
    number_in,
    same_text,
)

NUMBERS = {
    "#### 42": 42,
    "He has 3 apples and 4 pears.\n#### 7": 7,
    "#### 7\nQuestion: how many are 8 and 9?": 7,
    "#### $1,234": 1234,
    "#### -5": -5,
    "#### -$5": -5,
    "#### $-5": -5,
    "#### \u22125": -5,
    "#### 3.50": Fraction(7, 2),
    "#### 12.": 12,
    "#### 20%": 20,
    "The answer is 18.": 18,
    "That is 1,000,000 in all.": 1_000_000,
    "We have 1,2 and 3": 3,
    "so 10-3": 3,
    "10 - 3 = 7": 7,
    "it falls by -3": -3,
    "half: 1/2": Fraction(1, 2),
    "it takes 1 1/2 hours": Fraction(3, 2),
    "0.250": Fraction(1, 4),
    ".5": Fraction(1, 2),
    "(2+3)-4": 4,
    "no number at all": None,
    "": None,
    "####": None,
    "#### none, but 3 before: ": 3,
    "3/0": None,
    "9" * 5000: None,
}


@pytest.mark.parametrize(("text", "number"), NUMBERS.items(), ids=lambda value: str(value)[:20])
def test_the_number_that_an_answer_comes_to(text, number):
    assert number_in(text) == number


@given(
    st.integers(-(10**12), 10**12), st.sampled_from(["{}", "${}", "about {}.", "#### {}", "{}!"])
)
def test_a_number_is_found_however_python_writes_it(number, around):
    for written in (str(number), f"{number:,}", f"{number}.00"):
        assert number_in(around.format(written)) == number


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=1000))
def test_a_fraction_is_found_as_it_is_written(fraction):
    assert number_in(f"The result is {fraction}.") == fraction


@given(st.text(alphabet="0123456789/.,-$ #x", max_size=60))
def test_any_text_has_a_number_or_none(text):
    assert isinstance(number_in(text), Fraction | None)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Paris", " paris.\n", True),
        ("New  York\nCity", "new york city", True),
        ("\uff21\uff22", "ab", True),
        ("Paris", "Paris, France", False),
        ("3 + 4 = 7", "3 + 4 = 8", False),
    ],
)
def test_words_are_the_same_but_for_case_blanks_and_signs_around_them(one, other, same):
    assert same_text(one, other) is same


def test_an_answer_without_a_number_is_wrong_whatever_was_asked():
    assert not is_right("I do not know", "#### 3", by="number")
    assert is_right("so it is 3.0", "2 + 1 = 3 #### 3", by="number")


def test_numbers_are_compared_where_every_answer_has_its_mark():
    marked, plain = ("1 #### 1", "row 1"), ("one", "row 2")
    assert comparison_kind("auto", [marked, marked]) == "number"
    assert comparison_kind("auto", [marked, plain]) == "text"
    assert comparison_kind("number", [("1", "row 1")]) == "number"
    with pytest.raises(ConfigError, match=r"row 2: the answer has no number.*exact_match_by=text"):
        comparison_kind("number", [marked, plain])


def test_every_answer_of_gsm8k_has_a_number_and_is_its_own(real):
    for split in ("train", "test"):
        rows = read_rows(real(f"shared/data/sft/gsm8k_{split}.jsonl.gz"))
        answers = [row.values["answer"] for row in rows]
        assert comparison_kind("auto", [(text, "") for text in answers]) == "number"
        # What is known of the set: all are whole numbers but for a handful of decimals.
        finals = [text.rpartition("####")[2].strip().replace(",", "") for text in answers]
        assert all(
            number_in(text) == Fraction(final) for text, final in zip(answers, finals, strict=True)
        )
