"""What is refused before it is decomposed."""

import math

import pytest
import torch

from narrowcast.errors import ConfigError
from narrowcast.workloads.decompose.targets.language import check_language
from narrowcast.workloads.decompose.targets.toy import check_accuracy, check_features

RIGHT = 0.75 * torch.eye(4).repeat(3, 1, 1)


def test_what_is_right_passes():
    check_features("toy", inputs=RIGHT + 0.2, wanted=RIGHT)
    check_accuracy("toy", accuracy=torch.tensor([0.95, 1.0]), least=0.9)
    check_language("toy", cross_entropy=1.3, vocabulary=512)


@pytest.mark.parametrize(("row", "column"), [(2, 2), (2, 1)])
def test_one_feature_that_is_missing_or_mixed_into_another_is_enough(row, column):
    given = RIGHT.clone()
    given[1, row, column] = 0.75 - given[1, row, column]
    with pytest.raises(ConfigError, match=r"seed 1 of 3.*up to 1 of 4"):
        check_features("toy", inputs=given, wanted=RIGHT)


def test_numbers_that_are_none_are_dead():
    given = RIGHT.clone()
    given[0, 1, 1] = math.nan
    with pytest.raises(ConfigError, match=r"seed 0 of 3.*all outputs are 0"):
        check_features("toy", inputs=given, wanted=RIGHT)


def test_a_network_that_guesses_is_refused():
    with pytest.raises(ConfigError, match=r"seed 1 of 2.*at least 90%, got 10%"):
        check_accuracy("toy", accuracy=torch.tensor([0.95, 0.1]), least=0.9)


@pytest.mark.parametrize("cross_entropy", [math.log(512), 10.0, math.nan])
def test_a_language_model_that_guesses_is_refused(cross_entropy):
    with pytest.raises(ConfigError, match=r"chance is 6\.24"):
        check_language("toy", cross_entropy=cross_entropy, vocabulary=512)
