"""A decomposition with made-up numbers: what a task would write, without one."""

import math

import pytest
import torch

from narrowcast.runs import EvalRecord
from narrowcast.workloads.decompose.report.matrices import (
    component_picture,
    histogram,
    importance_picture,
)
from narrowcast.workloads.decompose.report.schema import (
    Component,
    Decomposition,
    MaskedLoss,
    SeedResult,
    Site,
)


def toy_site(name, weight, *, components, seeds, chance):
    """A site whose components are columns (or rows) of a polygon, with a little noise."""
    outputs, inputs = weight.shape
    features = max(inputs, outputs)
    order = torch.randperm(components, generator=chance)[:features]
    g = torch.rand(features, components, generator=chance) * 0.04
    g[range(features), order] = 0.97 + 0.03 * torch.rand(features, generator=chance)
    drawn, shown = importance_picture(g)
    largest = []
    for feature in range(features):
        truth = torch.zeros_like(weight)
        part = (slice(None), feature) if inputs == features else (feature, slice(None))
        truth[part] = weight[part]
        found = 0.998 * truth + 0.01 * torch.randn(weight.shape, generator=chance)
        cosine = torch.cosine_similarity(found.flatten(), truth.flatten(), dim=0)
        largest.append(
            Component(
                number=int(order[feature]),
                learned=component_picture(found),
                truth=component_picture(truth),
                name=f"feature {feature}",
                cosine=float(cosine),
                norm_ratio=float(found.norm() / truth.norm()),
                density=0.05,
            )
        )
    densities = torch.zeros(components)
    densities[order] = 0.05 * torch.rand(features, generator=chance) + 0.03
    return Site(
        name=name,
        inputs=inputs,
        outputs=outputs,
        components=components,
        expected=features,
        shape="identity",
        alive=(features,) * seeds,
        l0=tuple(0.19 + 0.01 * seed for seed in range(seeds)),
        identity_error=(0,) * (seeds - 1) + (2,),
        cosine=(0.9998,) * seeds,
        norm_ratio=tuple(0.997 + 0.0005 * seed for seed in range(seeds)),
        importance=drawn,
        importance_order=shown,
        largest=tuple(largest),
        densities=histogram(densities),
    )


@pytest.fixture(scope="session")
def toy():
    """TMS 5-2 with three seeds, of which the last failed."""
    angles = torch.arange(5) * 2 * math.pi / 5
    weight = 1.13 * torch.stack([angles.cos(), angles.sin()])
    chance = torch.Generator().manual_seed(0)
    made = {"components": 20, "seeds": 3, "chance": chance}
    right = "5 + 5 components; identity error 0; cosine 0.9998; norm ratio 0.997"
    return Decomposition(
        target="TMS 5-2",
        seeds=(0, 1, 2),
        drawn_seed=0,
        alive_threshold=0.1,
        probe="features one by one, at 0.75",
        sites=(
            toy_site("linear1", weight, **made),
            toy_site("linear2", weight.T.contiguous(), **made),
        ),
        verdicts=(
            SeedResult(seed=0, right=True, said=right),
            SeedResult(seed=1, right=True, said=right),
            SeedResult(seed=2, right=False, said="identity error 2 in linear1: <b> two features"),
        ),
    )


@pytest.fixture(scope="session")
def language():
    """24 sites of a language model with 4,000 components each, where no truth is known."""
    chance = torch.Generator().manual_seed(1)
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    sites = []
    for layer in range(4):
        for kind in kinds:
            shares = 10 ** (-6 * torch.rand(4000, generator=chance))
            shares[900:] = 0
            sites.append(
                Site(
                    name=f"model.layers.{layer}.{kind}",
                    inputs=128,
                    outputs=512,
                    components=4000,
                    alive=(900,),
                    l0=(float(shares.sum()),),
                    largest=tuple(
                        Component(
                            number=number,
                            learned=component_picture(
                                torch.outer(
                                    torch.randn(512, generator=chance),
                                    torch.randn(128, generator=chance),
                                )
                            ),
                            density=float(shares[number]),
                        )
                        for number in range(12)
                    ),
                    densities=histogram(shares),
                )
            )
    return Decomposition(
        target="Llama, 4 layers of 128",
        seeds=(0,),
        drawn_seed=0,
        alive_threshold=0.0,
        sites=tuple(sites),
        verdicts=(SeedResult(seed=0, said="21,600 of 96,000 components are alive"),),
        language=(
            MaskedLoss(mask="target", cross_entropy=2.71),
            MaskedLoss(
                mask="ci", cross_entropy=2.99, kl=0.3, ce_difference=0.28, ce_unrecovered=0.06
            ),
            MaskedLoss(
                mask="zero", cross_entropy=7.4, kl=4.9, ce_difference=4.69, ce_unrecovered=1.0
            ),
        ),
        pgd=((20, 0.83), (40, 1.35)),
    )


@pytest.fixture
def evaluations():
    """Six evaluations of two sites; one number is not finite."""
    return [
        EvalRecord(
            step=1000 * at,
            metrics={
                "loss": 0.1,
                "l0/linear1": 5.0 / (at + 1),
                "l0/linear2": 6.0 / (at + 1) if at != 3 else math.nan,
                "alive/linear1": 20.0 - 3 * at,
                "identity_error": float(30 - 6 * at),
                "faithfulness": 10.0 ** (-1 - at),
            },
        )
        for at in range(6)
    ]
