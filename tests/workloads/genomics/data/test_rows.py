import numpy as np
import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.genomics.data.rows import (
    Row,
    class_numbers,
    collect_classes,
    label_table,
    row_values,
)


def rows(*labels):
    return [
        Row(sequence="A", label=label, location=f"t.csv, record {n}")
        for n, label in enumerate(labels)
    ]


def test_known_classes_keep_their_order_where_they_hold_all():
    assert collect_classes(rows("b", "a"), ("c", "b", "a"), several=False) == ("c", "b", "a")
    assert collect_classes(rows("b", "x"), ("c", "b", "a"), several=False) == ("b", "x")


def test_numbers_are_in_the_order_of_numbers():
    assert collect_classes(rows("10", "9", "1"), (), several=False) == ("1", "9", "10")
    assert collect_classes(rows("10", "9", "b"), (), several=False) == ("10", "9", "b")


def test_digits_of_other_scripts_are_names():
    assert collect_classes(rows("²", "1"), (), several=False) == ("1", "²")


def test_more_classes_than_a_head_takes_are_refused():
    with pytest.raises(ConfigError, match=r"got 10,001.*target=value"):
        collect_classes(rows(*map(str, range(10_001))), (), several=False)


def test_labels_of_a_row_are_joined_with_semicolons():
    found = rows("b; a", "a", " ; ")
    assert collect_classes(found, (), several=True) == ("a", "b")
    assert label_table(found, ("a", "b")).tolist() == [[1, 1], [1, 0], [0, 0]]


@pytest.mark.parametrize("read", [class_numbers, label_table])
def test_a_class_that_is_not_named_is_refused_by_its_record(read):
    with pytest.raises(
        ConfigError, match=r"t\.csv, record 1: the class must be one of a, b, got 'c'"
    ):
        read(rows("a", "c", "b"), ("a", "b"))


@pytest.mark.parametrize("text", ["benign", "", "nan", "inf", "1e39"])
def test_what_is_no_number_is_refused_by_its_record(text):
    with pytest.raises(ConfigError, match=r"t\.csv, record 1: the label must be (a number|finite)"):
        row_values(rows("1.5", text))


def test_numbers_are_read_as_python_reads_them():
    assert row_values(rows("1.5", "-2", "1e-3")).tolist() == np.float32([1.5, -2, 1e-3]).tolist()
