"""What is held of the weights of a run, in bytes, by role."""

from torch import Tensor

from narrowcast.precision.weights.trained import TrainedWeights


def bytes_by_role(weights: TrainedWeights) -> dict[str, int]:
    """Return what is held on the device now, by role; gradients as if they were there.

    Leads are in it where there is a lookahead point.
    """
    states = weights.optimizer.state.values()
    moments = [t for state in states for t in state.values() if isinstance(t, Tensor)]
    graded = [p for p in weights.all if p.requires_grad]
    held = {
        "params": sum(map(_size, weights.all)),
        "grads": sum(p.numel() * (p.grad_dtype or p.dtype).itemsize for p in graded),
        "master": weights.masters.bytes(),
        "moments": sum(_size(t) for t in moments if t.device == weights.device or not t.dim()),
    }
    return held if weights.lookahead is None else {**held, "lookahead": weights.lookahead.bytes()}


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
