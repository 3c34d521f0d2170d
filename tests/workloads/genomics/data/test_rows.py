import numpy as np
import pytest

from narrowcast.errors import RecipeError
from narrowcast.workloads.genomics.data.rows import (
    Row,
    class_numbers,
    classes_of,
    label_table,
    values_of,
)


def rows(*labels):
    return [
        Row(sequence="A", label=label, place=f"t.csv, record {n}") for n, label in enumerate(labels)
    ]


def test_known_classes_keep_their_order_where_they_hold_all():
    assert classes_of(rows("b", "a"), ("c", "b", "a"), several=False) == ("c", "b", "a")
    assert classes_of(rows("b", "x"), ("c", "b", "a"), several=False) == ("b", "x")


def test_numbers_are_in_the_order_of_numbers():
    assert classes_of(rows("10", "9", "1"), (), several=False) == ("1", "9", "10")
    assert classes_of(rows("10", "9", "b"), (), several=False) == ("10", "9", "b")


def test_digits_of_other_scripts_are_names():
    assert classes_of(rows("²", "1"), (), several=False) == ("1", "²")


def test_more_classes_than_a_head_takes_are_refused():
    with pytest.raises(RecipeError, match=r"10,001 classes.*target=value"):
        classes_of(rows(*map(str, range(10_001))), (), several=False)


def test_labels_of_a_row_are_joined_with_semicolons():
    found = rows("b; a", "a", " ; ")
    assert classes_of(found, (), several=True) == ("a", "b")
    assert label_table(found, ("a", "b")).tolist() == [[1, 1], [1, 0], [0, 0]]


@pytest.mark.parametrize("read", [class_numbers, label_table])
def test_a_class_that_is_not_named_is_refused_by_its_record(read):
    with pytest.raises(RecipeError, match=r"t\.csv, record 1: class 'c' is not among a, b"):
        read(rows("a", "c", "b"), ("a", "b"))


@pytest.mark.parametrize("text", ["benign", "", "nan", "inf", "1e39"])
def test_what_is_no_number_is_refused_by_its_record(text):
    with pytest.raises(RecipeError, match=r"t\.csv, record 1: its label .* is no"):
        values_of(rows("1.5", text))


def test_numbers_are_read_as_python_reads_them():
    assert values_of(rows("1.5", "-2", "1e-3")).tolist() == np.float32([1.5, -2, 1e-3]).tolist()
