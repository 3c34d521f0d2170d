"""The zoo: models by name, what each is, and what it needs."""

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from narrowcast.bench.zoo import language, pictures
from narrowcast.bench.zoo.built import Built, build_mine, place_of
from narrowcast.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the zoo."""

    about: str
    build: Callable[..., Built]
    """From the device and `quick=`: whether it is to be tiny."""
    transformers: bool = True
    """Whether that library builds it."""
    liger: bool = False
    """Whether Liger has kernels for it."""

    @property
    def missing(self) -> str:
        """What has to be installed for it, or nothing."""
        if not self.transformers or importlib.util.find_spec("transformers"):
            return ""
        return "transformers is not installed; pip install 'narrowcast[sft]'"


ZOO: Mapping[str, Entry] = {
    "llama-348m": Entry(
        about="transformers' Llama, width 1024, 24 layers, 16 × 1024 tokens",
        build=language.llama,
        liger=True,
    ),
    "llama-1.3b": Entry(
        about="transformers' Llama, width 2048, 24 layers, 8 × 2048 tokens",
        build=partial(language.llama, large=True),
        liger=True,
    ),
    "qwen2-0.5b": Entry(
        about="transformers' Qwen2 in the shape of Qwen2.5-0.5B, 8 × 1024 tokens",
        build=language.qwen,
        liger=True,
    ),
    "gpt2-124m": Entry(about="transformers' GPT-2, 16 × 1024 tokens", build=language.gpt2),
    "bert-base": Entry(about="transformers' BERT, masked, 32 × 512 tokens", build=language.bert),
    "vit-l": Entry(about="transformers' ViT-L/16, 64 × 224²", build=pictures.vit),
    "resnet-50": Entry(
        about="transformers' ResNet-50, 256 × 224², channels last", build=pictures.resnet
    ),
    "unet": Entry(
        about="a U-Net of diffusion, 64 × 64², channels last",
        build=pictures.unet,
        transformers=False,
    ),
    "lstm": Entry(
        about="an LSTM language model, 2 × 1024, 64 × 256 tokens",
        build=language.lstm,
        transformers=False,
    ),
    "hyena": Entry(
        about="this library's Hyena model, width 768, 12 layers, 2 × 8192 letters",
        build=language.hyena,
        transformers=False,
    ),
    "encoder": Entry(
        about="nn.TransformerEncoder, 12 × 1024, 32 × 512",
        build=pictures.encoder,
        transformers=False,
    ),
    "gpt-406m": Entry(
        about="the plain GPT of lm/gpt-350m, 16 × 1024 tokens",
        build=language.gpt,
        transformers=False,
    ),
}


def chosen(only: Iterable[str], *, mine: str | None) -> tuple[str, ...]:
    """Return the models asked for: those named, one's own, or all of the zoo."""
    named = tuple(dict.fromkeys(only))
    for name in named:
        if name not in ZOO:
            close = difflib.get_close_matches(name, ZOO, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(ZOO)}"
            raise RecipeError(f"--only {name}: no model of the zoo is called that; {hint}")
    if mine is not None:
        place_of(mine)
        return (mine, *named)
    return named or tuple(ZOO)


def entry_of(name: str) -> Entry:
    """Return a model of the zoo by its name, or one's own by its place."""
    if name in ZOO:
        return ZOO[name]
    # Whether Liger knows it is found out when it is built.
    return Entry(
        about="one's own",
        build=lambda device, *, quick: build_mine(name, device),
        transformers=False,
        liger=True,
    )


def built(name: str, device: torch.device, *, quick: bool) -> Built:
    """Build a model from one seed, on its device."""
    torch.manual_seed(0)
    return entry_of(name).build(device, quick=quick)
