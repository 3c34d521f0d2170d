import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.decomposition import FastICA

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.ica import ICA, ArraySignals, Percentile

SOLVED = [
    (solver, contrast)
    for solver in ("parallel", "deflation", "picard")
    for contrast in ("logcosh", "cube", "exp")
]

ANGLE = (2 * 1e-6) ** 0.5
"""How far loadings, which are at most 1, may be apart where `tol=1e-6` bounds 1 - cosine."""


def networks(components, percentile=95):
    select = Percentile(percentile).select
    return [set(select(column)) for column in components.loadings.T]


@pytest.fixture(scope="module")
def signals(planted):
    return planted()


@pytest.fixture(scope="module")
def reference(signals):
    x = signals.signals.numpy()
    x = (x - x.mean(0)) / x.std(0)
    return FastICA(5, random_state=0, max_iter=200, tol=1e-3).fit(x).mixing_


@pytest.mark.parametrize(("solver", "contrast"), SOLVED)
def test_planted_supports_are_found(signals, mean_best_iou, solver, contrast):
    found = ICA(components=5, solver=solver, contrast=contrast).fit(ArraySignals(signals.signals))
    assert mean_best_iou(signals.supports, networks(found)) >= 0.8


@pytest.mark.parametrize("solver", ["parallel", "picard"])
def test_loadings_are_those_of_scikit_learn_up_to_order_and_sign(signals, reference, solver):
    found = ICA(components=5, solver=solver, tol=1e-7).fit(ArraySignals(signals.signals))
    mine, theirs = found.loadings.double().numpy(), reference
    cosine = np.abs(
        (mine / np.linalg.norm(mine, axis=0)).T @ (theirs / np.linalg.norm(theirs, axis=0))
    )
    # Both stop at a tolerance: scikit-learn's 1e-3 bounds how far 1 - cosine may be.
    assert cosine.max(1).min() > 1 - 1e-3
    np.testing.assert_allclose(
        np.sort(np.linalg.norm(mine, axis=0)), np.sort(np.linalg.norm(theirs, axis=0)), rtol=1e-2
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_the_bits_select_the_same_channels(signals, dtype):
    source = ArraySignals(signals.signals)
    wide, narrow = ICA(components=5), ICA(components=5, ica_dtype=dtype)
    in_full, in_half = wide.collect(source), narrow.collect(source)
    assert in_half.signals.bytes * 2 == in_full.signals.bytes
    assert networks(narrow.fit(in_half)) == networks(wide.fit(in_full))


def test_the_same_seed_gives_the_same_bits(signals):
    source = ArraySignals(signals.signals)
    one, other = (ICA(components=5, seed=3).fit(source) for _ in range(2))
    assert torch.equal(one.loadings, other.loadings)
    assert torch.equal(one.stability, other.stability)


def test_another_seed_gives_the_same_components_in_the_same_order(signals):
    source = ArraySignals(signals.signals)
    one, other = (ICA(components=5, seed=seed, tol=1e-6).fit(source) for seed in (0, 1))
    torch.testing.assert_close(one.loadings, other.loadings, atol=ANGLE, rtol=0)


def test_shuffled_rows_give_the_same_components_in_the_same_order(signals):
    shuffled = signals.signals[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    ica = ICA(components=5, tol=1e-6)
    one, other = ica.fit(ArraySignals(signals.signals)), ica.fit(ArraySignals(shuffled))
    torch.testing.assert_close(one.loadings, other.loadings, atol=ANGLE, rtol=0)


def test_components_have_an_order_and_a_sign_of_their_own(
    signals,
):
    found = ICA(components=5).fit(ArraySignals(signals.signals))
    assert found.explained.tolist() == sorted(found.explained.tolist(), reverse=True)
    heaviest = found.loadings.gather(0, found.loadings.abs().argmax(0, keepdim=True))
    assert (heaviest > 0).all()


def test_sources_are_recovered(signals):
    found = ICA(components=5).fit(ArraySignals(signals.signals))
    sources = found.sources(signals.signals).double().numpy()
    np.testing.assert_allclose(sources.std(0), 1, rtol=1e-3)
    correlation = np.abs(np.corrcoef(sources.T, signals.sources.T)[:5, 5:])
    assert correlation.max(1).min() > 0.99


def test_planted_components_are_stable_and_noise_is_not(planted):
    clear = ICA(components=5).fit(ArraySignals(planted().signals))
    noise = torch.randn(1000, 30, generator=torch.Generator().manual_seed(0))
    unclear = ICA(components=10).fit(ArraySignals(noise))
    assert clear.stability.min() > 0.99
    assert unclear.stability.mean() < 0.9
    assert "stability" in [finding.kind for finding in unclear.findings]
    assert clear.findings == ()


@pytest.mark.parametrize("solver", ["parallel", "deflation", "picard"])
def test_layers_solved_side_by_side_are_what_each_is_alone(planted, solver):
    sets = [ArraySignals(planted(seed=seed).signals) for seed in range(3)]
    ica = ICA(components=5, solver=solver, tol=1e-6)
    for alone, together in zip(map(ica.fit, sets), ica.fit_each(sets), strict=True):
        torch.testing.assert_close(together.loadings, alone.loadings, atol=ANGLE, rtol=0)


def test_more_than_a_thousand_components_are_possible():
    wide = torch.randn(1100, 1020, generator=torch.Generator().manual_seed(0))
    found = ICA(components=1010, solver="parallel", restarts=1, max_iter=1).fit(ArraySignals(wide))
    assert found.count == 1010
    assert "convergence" in [finding.kind for finding in found.findings]


def test_a_constant_channel_is_in_no_component(signals):
    x = signals.signals.clone()
    x[:, 7] = 3.1
    found = ICA(components=5).fit(ArraySignals(x))
    assert found.loadings.isfinite().all()
    assert (found.loadings[7] == 0).all()
    assert [finding.kind for finding in found.findings] == ["constant"]


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_unit_of_signals_does_not_matter(signals, scale):
    ica = ICA(components=5, standardise=False, tol=1e-6)
    one = ica.fit(ArraySignals(signals.signals))
    other = ica.fit(ArraySignals(signals.signals * scale))
    torch.testing.assert_close(one.loadings, other.loadings, atol=ANGLE, rtol=0)


@pytest.mark.parametrize("solver", ["parallel", "deflation", "picard"])
def test_a_solver_that_overflows_is_run_again_in_float64(monkeypatch, signals, solver):
    from narrowcast.workloads.sft.ica import solvers as contrast

    def slopes(x):  # as if a fourth power were too large for float32
        slope, curvature = contrast.CONTRASTS["logcosh"].slopes(x)
        return slope * (torch.inf if x.dtype == torch.float32 else 1), curvature

    broken = contrast.Contrast(value=contrast.CONTRASTS["logcosh"].value, slopes=slopes)
    monkeypatch.setattr("narrowcast.workloads.sft.ica.ica.CONTRASTS", {"logcosh": broken})
    found = ICA(components=5, solver=solver).fit(ArraySignals(signals.signals))
    assert "solver" in [finding.kind for finding in found.findings]
    assert "solved in float64" in str(found.findings[0])
    assert found.loadings.isfinite().all()


def test_more_components_than_directions_are_refused(signals):
    few = signals.signals[:, :1] @ torch.ones(1, 30) * torch.linspace(1, 2, 30)
    with pytest.raises(ConfigError, match="components must be at most 1, the rank"):
        ICA(components=3).fit(ArraySignals(few))


def test_more_components_than_rows_are_refused(signals):
    with pytest.raises(ConfigError, match=r"components must be at most 9 for 10 rows"):
        ICA(components=30).fit(ArraySignals(signals.signals[:10]))


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ({"solver": "sobi"}, "solver must be one of parallel, deflation, picard"),
        ({"contrast": "tanh"}, "contrast must be one of logcosh, cube, exp"),
        ({"components": 0}, "components must be a whole number of 1 or more"),
        ({"tol": 0.0}, "between 0 and 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, advice):
    with pytest.raises(ConfigError, match=advice):
        ICA(**wrong)


def test_nothing_but_torch_and_numpy_is_needed():
    code = (
        "import sys, narrowcast.workloads.sft.ica; "
        "print(sorted({'transformers', 'peft', 'sklearn', 'scipy', 'click'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.gpu
@pytest.mark.parametrize("solver", ["parallel", "deflation", "picard"])
def test_a_gpu_finds_what_a_cpu_does(signals, solver):
    source = ArraySignals(signals.signals)
    here = ICA(components=5, solver=solver, tol=1e-6).fit(source)
    there = ICA(components=5, solver=solver, tol=1e-6, device=torch.device("cuda"))
    for found in (there.fit(source), there.fit(there.collect(source))):
        if solver == "deflation":  # what rounding does to one component, all after it inherit
            alike = torch.cosine_similarity(found.loadings.cpu(), here.loadings, dim=0)
            assert alike.min() > 0.99
        else:
            torch.testing.assert_close(found.loadings, here.loadings, atol=2 * ANGLE, rtol=0)
