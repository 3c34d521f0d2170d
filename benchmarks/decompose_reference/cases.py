"""What both sides decompose: the same targets, sites, importance functions and losses."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from decompose_reference import losses, targets
from decompose_reference.training import Objective, Run, Settings

ENDLESS = 10**9
"""Steps of a reference that is only timed: its learning rate and p stay as they begin."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One decomposition, for the reference and for narrowcast."""

    name: str
    recipe: str
    """Of narrowcast."""
    words: tuple[str, ...] = ()
    """Settings that the recipe is given."""
    settings: Settings
    """Of the reference."""
    target: Callable[[], nn.Module]
    batches: Callable[[torch.device], Iterator[Tensor]]
    output: Callable[..., Tensor] = field(default=lambda found: found)
    attribute: str | None = None
    """The same as a name."""

    def run(self, device: torch.device) -> Run:
        """Return the reference, ready to take steps."""
        torch.manual_seed(0)
        return Run(self.target(), self.settings, device=device, output=self.output)


TMS_BATCH = {"cuda": 4096, "cpu": 1024}
"""Samples of a step: what others train with on a GPU, and what is enough."""


def toy_cases(kind: str, *, bf16: bool) -> list[Case]:
    """Return TMS 5-2 and a residual MLP of one layer, as they are decomposed on that device."""
    batch = TMS_BATCH[kind]
    mse = {"divergence": losses.mse, "stochastic": 1.0, "layerwise": 1.0}
    tms = Settings(
        patterns={"linear*": 20},
        importance="mlp",
        hidden=(16,),
        objective=Objective(minimality=3e-3, p=1.0, **mse),
        lr=5e-3,
        steps=ENDLESS,
        tied={"linear2": "linear1"},
        bf16=bf16,
    )
    resid = Settings(
        patterns={"mlp_*": 100},
        importance="mlp",
        hidden=(16,),
        objective=Objective(minimality=1e-5, p=2.0, **mse),
        lr=2e-3,
        steps=ENDLESS,
        cosine=False,
        bf16=bf16,
    )
    return [
        Case(
            name="TMS 5-2",
            recipe="decompose/tms_5-2",
            words=(f"batch_size={batch}",),
            settings=tms,
            target=targets.pentagon,
            batches=lambda device: targets.sparse_features(batch, 5, 0.05, device=device),
        ),
        Case(
            name="ResidMLP 1",
            recipe="decompose/resid_mlp1",
            words=("batch_size=2048",),
            settings=resid,
            target=targets.made_resid_mlp,
            batches=lambda device: targets.sparse_features(2048, 100, 0.01, device=device, low=-1),
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a language model is, and what it is shown."""

    layers: int = 4
    width: int = 128
    mlp: int = 512
    vocabulary: int = targets.VOCABULARY
    components: int = 650
    hidden: int = 550
    batch: int = 64
    length: int = 512
    tokens: int = 2**19
    pretraining: int = 300


SMALL = Size(
    layers=2, width=32, mlp=64, vocabulary=500, components=40, hidden=32, batch=8, length=64,
    tokens=2**16, pretraining=50,
)  # fmt: skip
"""For a CPU, to see that all of it works: what is claimed is claimed of the other."""
SITES = ("self_attn.?_proj", "mlp.up_proj", "mlp.down_proj")
COEFFICIENTS = {"minimality": 1e-3, "subset": 0.5, "pgd_subset": 0.5, "faithfulness": 1e6}


def language_case(folder: Path, size: Size, *, device: torch.device, bf16: bool = True) -> Case:
    """Make a language model and its text in `folder`, and return its decomposition."""
    tokens = targets.made_tokens(size.tokens, vocabulary=size.vocabulary)
    made = targets.language_model(
        layers=size.layers, width=size.width, hidden=size.mlp, vocabulary=size.vocabulary
    )
    targets.train_language_model(made, tokens, steps=size.pretraining, device=device, tell=print)
    text = targets.write_language(folder, made.cpu(), tokens)
    patterns = {f"model.layers.*.{site}": size.components for site in SITES}
    objective = Objective(
        divergence=losses.kl, p=2.0, pgd_steps=1, pgd_step_size=1.0, **COEFFICIENTS
    )
    settings = Settings(
        patterns=patterns,
        importance="shared_mlp",
        hidden=(size.hidden,),
        objective=objective,
        lr=2e-4,
        steps=ENDLESS,
        bf16=bf16,
    )

    def target() -> nn.Module:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(folder).eval()

    def batches(device: torch.device) -> Iterator[Tensor]:
        loader = DataLoader(
            targets.windows(tokens, size.length), size.batch, shuffle=True, drop_last=True
        )
        while True:
            for batch in loader:
                yield batch.to(device)

    return Case(
        name=f"LM, {size.layers} × {size.width}, {6 * size.layers} sites, C {size.components}",
        recipe="decompose/lm",
        words=_words(folder, text, patterns, size),
        settings=settings,
        target=target,
        batches=batches,
        output=lambda found: found.logits,
        attribute="logits",
    )


def _words(folder: Path, text: Path, patterns: dict[str, int], size: Size) -> tuple[str, ...]:
    names = {
        "minimality": "minimality",
        "subset": "stochastic_subset",
        "pgd_subset": "pgd_subset",
        "faithfulness": "faithfulness",
    }
    terms = [f"losses.{names[name]}.coefficient={value}" for name, value in COEFFICIENTS.items()]
    return (
        f"model.path={folder}",
        f"data.text=[{text}]",
        f"data.length={size.length}",
        f"batch_size={size.batch}",
        f"sites.names=[{', '.join(patterns)}]",
        f"sites.components={size.components}",
        "importance.kind=shared_mlp",
        f"importance.hidden=[{size.hidden}]",
        "losses.minimality.p=2.0",
        "losses.minimality.p_final=null",
        "decomposition.clip_components=null",  # the reference does not clip
        "losses.pgd_subset.steps=1",
        "losses.pgd_subset.step_size=1.0",
        *terms,
    )
