"""Planted sources among loud rows: what ICA recovers with and without `clip_activations`.

Run: python benchmarks/ica_clipping.py

3,000 rows of 300 channels, 5 Laplace sources that each drive 15 channels, and noise. Loud rows get
a random direction of their own, with a standard deviation of 300 for one row or 30 for 1 % of the
rows. Prints the mean IoU of the best match of each planted network, over three seeds.
"""

import numpy as np
import torch

from narrowcast.workloads.sft.ica import ICA, ArraySignals, Percentile

ROWS, CHANNELS, SOURCES, SUPPORT = 3000, 300, 5, 15
CLIPS = (None, 99.9, 99.0)
ACTIVE = {"all rows": 1.0, "5 % of rows": 0.05, "1 % of rows": 0.01, "0.3 % of rows": 0.003}
LOUD = {"none": (0, 0.0), "one": (1, 300.0), "1 %": (30, 30.0)}


def planted(seed: int, active: float) -> tuple[torch.Tensor, list[set[int]]]:
    """Return signals and the channels of each source."""
    chance = np.random.default_rng(seed)
    sources = chance.laplace(size=(ROWS, SOURCES))
    sources *= (chance.random((ROWS, SOURCES)) < active) / np.sqrt(active)
    mixing = np.zeros((CHANNELS, SOURCES))
    for column in mixing.T:
        support = chance.choice(CHANNELS, SUPPORT, replace=False)
        signs = chance.choice([-1, 1], SUPPORT)
        column[support] = signs * chance.uniform(0.5, 2, SUPPORT)
    clean = sources @ mixing.T
    signals = torch.tensor(clean + 0.1 * chance.normal(size=clean.shape), dtype=torch.float32)
    return signals, [set(np.nonzero(column)[0].tolist()) for column in mixing.T]


def recovered(seed: int, active: float, loud: tuple[int, float], clip: float | None) -> float:
    """Return the mean IoU of planted networks with the best match among those found."""
    signals, supports = planted(seed, active)
    count, factor = loud
    chance = torch.Generator().manual_seed(seed + 10)
    rows = torch.randperm(ROWS, generator=chance)[:count]
    signals[rows] += factor * torch.randn(count, CHANNELS, generator=chance)
    components = ICA(components=SOURCES, clip_activations=clip).fit(ArraySignals(signals))
    found = [set(Percentile(95).select(column)) for column in components.loadings.T]
    return float(np.mean([max(len(a & b) / len(a | b) for b in found) for a in supports]))


def main() -> None:
    print("| sources are active in | loud rows | not clipped | 99.9 | 99 |")
    print("|---|---|---|---|---|")
    for active, share in ACTIVE.items():
        for name, loud in LOUD.items():
            means = [np.mean([recovered(s, share, loud, c) for s in range(3)]) for c in CLIPS]
            print(f"| {active} | {name} | {' | '.join(f'{each:.2f}' for each in means)} |")


if __name__ == "__main__":
    main()
