"""Networks of a model that somebody else trained, silenced and kept: stories260K."""

import importlib.util
from pathlib import Path

import pytest
from scipy.stats import spearmanr

from narrowcast.workloads.sft.ica import ICA, Percentile, TopK, ablate
from narrowcast.workloads.sft.ica.masks import preserved
from narrowcast.workloads.sft.ica.study.ablate import score

ROOT = Path(__file__).parents[4]
DATA = ROOT / "../shared/data"

pytestmark = pytest.mark.skipif(
    not (DATA / "lm_stories260K").is_dir() or not (DATA / "text/tinystories_head.txt").is_file(),
    reason="needs the stories260K checkpoint and TinyStories in ../shared/data",
)


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location(
        "ica_evidence", ROOT / "benchmarks" / "ica_evidence.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(study):
    return study.stories_model(DATA / "lm_stories260K")


@pytest.fixture(scope="module")
def stories(study):
    return study.stories_documents(DATA, 60)


@pytest.fixture(scope="module")
def heard(study, trained, stories):
    return study.Heard(trained, stories[20:])


def test_the_trained_model_predicts_its_stories_as_published(study, trained, stories):
    level = score(trained, stories[:20])
    assert level.tokens.sum() == 6449
    assert level.level.loss == pytest.approx(study.STORIES_KNOWN, abs=0.0005)


def test_a_network_of_two_in_a_hundred_channels_matters_more_than_random_ones(
    trained, stories, heard
):
    networks = heard.networks(ICA(components=1), TopK(6))
    found = ablate(trained, stories[:4], networks, share_masks=1, keep=())
    assert found.lesion.channels / found.channels <= 0.02
    assert found.lesion.equal.at_least == 0  # above all 39
    assert found.lesion.equal.answer == "more"


def test_the_more_networks_are_kept_the_less_is_lost(trained, stories, heard):
    counts, losses = [1, 4, 12, 24], []
    for count in counts:
        channels = heard.networks(ICA(components=count, restarts=1), Percentile(98)).channels()
        with preserved(trained, channels):
            losses.append(score(trained, stories[:4]).level.loss)
    assert spearmanr(counts, losses).statistic <= -0.8
