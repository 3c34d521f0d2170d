"""Models of pictures, and torch's own encoder, at the shapes people know them by."""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.bench.zoo.built import Built, drawing, own_loss
from narrowcast.bench.zoo.networks import EncoderClassifier, UNet

CLASSES = 1000
"""Of ImageNet."""


def vit(device: torch.device, *, quick: bool) -> Built:
    """Return ViT-L/16 as transformers builds it."""
    library: Any = importlib.import_module("transformers")
    large = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
             "intermediate_size": 4096, "image_size": 224}  # fmt: skip
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 64, "image_size": 32}  # fmt: skip
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with device:
        model = library.ViTForImageClassification(
            library.ViTConfig(num_labels=CLASSES, **(tiny if quick else large), **off)
        )
    pictures, labels = _pictures(device, count=2 if quick else 64, size=32 if quick else 224)
    return _labelled(model, pictures, labels)


def resnet(device: torch.device, *, quick: bool) -> Built:
    """Return ResNet-50 as transformers builds it, channels last."""
    library: Any = importlib.import_module("transformers")
    tiny = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
    with device:
        model = library.ResNetForImageClassification(
            library.ResNetConfig(num_labels=CLASSES, **(tiny if quick else {}))
        )
    pictures, labels = _pictures(device, count=2 if quick else 256, size=32 if quick else 224)
    return _labelled(
        _channels_last(model), pictures.contiguous(memory_format=torch.channels_last), labels
    )


def unet(device: torch.device, *, quick: bool) -> Built:
    """Return a U-Net that predicts the noise of pictures, channels last."""
    widths, count, size = ((32, 64), 2, 8) if quick else ((128, 256, 384, 512), 64, 64)
    with device:
        model = UNet(widths)
    generator = drawing(device)
    drawn = [
        torch.randn(count, 3, size, size, generator=generator, device=device) for _ in range(2)
    ]
    time = torch.randn(count, widths[0], generator=generator, device=device)
    pictures, noise = (each.contiguous(memory_format=torch.channels_last) for each in drawn)
    return Built(
        model=_channels_last(model).train(), loss_of=_of_noise, inputs=(pictures, time, noise)
    )


def encoder(device: torch.device, *, quick: bool) -> Built:
    """Return torch's own transformer encoder, with a class for each position."""
    width, layers, heads, count, length = (32, 2, 4, 2, 16) if quick else (1024, 12, 16, 32, 512)
    with device:
        model = EncoderClassifier(width, layers=layers, heads=heads, classes=CLASSES)
    generator = drawing(device)
    x = torch.randn(count, length, width, generator=generator, device=device)
    labels = torch.randint(CLASSES, (count, length), generator=generator, device=device)
    return Built(model=model.train(), loss_of=_of_classes, inputs=(x, labels))


def _pictures(device: torch.device, *, count: int, size: int) -> tuple[Tensor, Tensor]:
    generator = drawing(device)
    pictures = torch.randn(count, 3, size, size, generator=generator, device=device)
    return pictures, torch.randint(CLASSES, (count,), generator=generator, device=device)


def _labelled(model: nn.Module, pictures: Tensor, labels: Tensor) -> Built:
    names = ("pixel_values", "labels")
    return Built(model=model.train(), loss_of=own_loss(*names), inputs=(pictures, labels))


def _channels_last(model: nn.Module) -> nn.Module:
    # torch's stubs know no memory_format of a module.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def _of_classes(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), labels.flatten())


def _of_noise(model: nn.Module, pictures: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(model(pictures, time).float(), noise)
