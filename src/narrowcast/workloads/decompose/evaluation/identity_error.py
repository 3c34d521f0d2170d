"""How far causal importances are from what is known of a toy network's components.

Asked of each feature alone, a site of one component a feature says so by a matrix that is the
identity, once its columns are put in order; a site whose k components serve every feature has k
columns with something in them, and nothing in the others.
"""

import torch
from torch import Tensor

from narrowcast.workloads.decompose.evaluation.assignment import best_assignment
from narrowcast.workloads.decompose.targets.toy import Truth

TOLERANCES = (0.1, 0.2)
"""Those that are published; 0.1 is the stricter."""


def importance_error(importance: Tensor, truth: Truth, *, tolerance: float = 0.1) -> Tensor:
    """Return for each seed (seeds,) how many entries are wrong; waits for the device.

    `importance` (seeds, features, components) are the lower importances of each feature alone.
    """
    if truth.kind == "identity":
        return identity_error(importance, tolerance=tolerance)
    return dense_error(importance, truth.size, tolerance=tolerance)


def identity_error(importance: Tensor, *, tolerance: float) -> Tensor:
    """Count features whose component says less than 1, and other components that say more than 0.

    A feature for which there is no component left is one error.
    """
    importance = importance.detach().float().cpu()
    on_diagonal = torch.zeros_like(importance, dtype=torch.bool)
    for seed, columns in enumerate(matched_component(importance)):
        inputs = columns >= 0
        on_diagonal[seed, inputs.nonzero().flatten(), columns[inputs]] = True
    result = (on_diagonal & (importance >= 1 - tolerance)).sum((1, 2))
    # Not a number is neither below nor above: it counts as wrong.
    others = (~on_diagonal & ~(importance <= tolerance)).sum((1, 2))
    return importance.shape[1] - result + others


def dense_error(importance: Tensor, components: int, *, tolerance: float) -> Tensor:
    """Count those of the `components` heaviest columns in which nothing says 1, and what is said
    in all others by more than 0."""
    importance = importance.detach().float().cpu()
    order = importance.nan_to_num().sum(dim=1).argsort(dim=1, descending=True)
    sorted_ = importance.gather(2, order[:, None].expand_as(importance))
    used, others = sorted_[:, :, :components], sorted_[:, :, components:]
    matched = (used >= 1 - tolerance).any(dim=1).sum(dim=1)
    return components - matched + (~(others <= tolerance)).sum((1, 2))


def matched_component(importance: Tensor) -> Tensor:
    """Return for each seed and feature the component that is taken for it, or -1.

    No component is taken twice, and together they are as important as can be.
    """
    matrices = importance.detach().float().nan_to_num().cpu().double().numpy()
    return torch.stack([torch.from_numpy(best_assignment(matrix)) for matrix in matrices])


def identity_order(importance: Tensor) -> Tensor:
    """Return for each seed (seeds, components) an order of columns with the identity in front."""
    orders = []
    for columns in matched_component(importance):
        taken = columns[columns >= 0]
        left = torch.ones(importance.shape[2], dtype=torch.bool)
        left[taken] = False
        orders.append(torch.cat([taken, left.nonzero().flatten()]))
    return torch.stack(orders)
