"""Every model of the zoo: tiny ones trained here in every way, large ones by their shapes."""

import math

import pytest
import torch

from narrowcast.bench.zoo.models import ZOO, build_model, select_models
from narrowcast.bench.zoo.ways import BF16, BF16_SPLIT, FP8_SPLIT, make_step, trials
from narrowcast.errors import ConfigError, UnsupportedError

# transformers' DeBERTa compiles functions with torch.jit when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is dep:DeprecationWarning")
CPU = torch.device("cpu")
MILLIONS = {
    "llama-348m": 349, "llama-1.3b": 1345, "qwen2-0.5b": 494, "gpt2-124m": 124, "bert-base": 110,
    "vit-l": 304, "resnet-50": 26, "unet": 27, "lstm": 82, "hyena": 86, "encoder": 152,
    "t5-base": 223, "whisper-small": 242, "wav2vec2-base": 94, "convnext-b": 89, "swin-b": 88,
    "segformer-b2": 27, "detr-r50": 42, "clip-b16": 150, "videomae-b": 87, "deberta-v3-base": 185,
    "esm2-150m": 148, "mamba2-130m": 129, "qwen3-0.6b": 596, "dac": 77, "dlrm": 334, "dit": 304,
}  # fmt: skip
"""As their papers and cards have it, and as layers of known shapes add up."""


JUMPS = {"dac"}
"""Models with discrete codes, whose loss jumps between the first steps."""
WAIT = {
    "dac", "detr-r50", "videomae-b", "deberta-v3-base", "mixtral-350m", "qwen3-moe-0.9b",
    "wav2vec2-base",
}  # fmt: skip
"""Models whose forward pass waits for the device, so that it cannot be captured."""


@pytest.fixture(autouse=True)
def _library(request):
    name = request.node.callspec.params.get("name") if "callspec" in vars(request.node) else None
    if name in ZOO and ZOO[name].transformers:
        pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MILLIONS)
def test_a_model_has_the_size_that_its_name_says(name):
    made = ZOO[name].build(torch.device("meta"), quick=False)
    assert round(sum(p.numel() for p in made.model.parameters()) / 1e6) == MILLIONS[name]


@pytest.mark.parametrize(("index", "name"), list(enumerate(ZOO)))
def test_every_way_begins_at_the_same_loss_and_lowers_it(index, name):
    losses = []
    ours = (BF16, BF16_SPLIT, FP8_SPLIT)[index % 3]  # each model takes one of them, in turn
    for trial in trials([name], ways=["amp", ours], modes=["eager"]):
        step, _ = make_step(build_model(name, CPU, quick=True), trial, CPU)
        losses.append([float(step()) for _ in range(3)])
    plain = losses[0]
    assert len(losses) == 2
    for mine in losses:
        assert mine[-1] < mine[0] or name in JUMPS
        # Formats of two bits less than bf16's eight, and a loss that is a mean of many.
        assert all(math.isclose(a, b, rel_tol=2.0**-6) for a, b in zip(mine, plain, strict=True))


@pytest.mark.gpu
# torch lays weights of recurrent layers side by side for cuDNN in any format but bf16.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single:UserWarning")
@pytest.mark.parametrize("name", ZOO)
def test_on_a_gpu_every_way_lowers_the_loss_as_torch_does(name):
    device = torch.device("cuda")
    losses = []
    for trial in trials([name], ways=["amp", "ours"], modes=["eager", "graphed"]):
        step, _ = make_step(build_model(name, device, quick=True), trial, device)
        try:
            losses.append([float(step()) for _ in range(5)])
        except UnsupportedError as error:
            waits = name in WAIT and trial.mode == "graphed"
            if not waits or "it waits for the device at " not in str(error):
                raise
    for mine in losses:
        assert mine[-1] < mine[0] or name in JUMPS
        assert all(
            math.isclose(a, b, rel_tol=2.0**-5) for a, b in zip(mine, losses[0], strict=True)
        )


def test_models_are_named_or_all():
    assert select_models([], mine=None) == tuple(ZOO)
    assert select_models(["vit-l", "unet", "vit-l"], mine=None) == ("vit-l", "unet")
    assert select_models([], mine="a.b:c") == ("a.b:c",)
    assert select_models(["unet"], mine="a.b:c") == ("a.b:c", "unet")
    with pytest.raises(ConfigError, match="Did you mean resnet-50"):
        select_models(["resnet50"], mine=None)
