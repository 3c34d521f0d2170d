"""Build the data, the targets and the network that a genomics recipe describes."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.workloads.genomics.data.examples import Examples, on
from narrowcast.workloads.genomics.data.preparing import Examined, as_examples, examine
from narrowcast.workloads.genomics.data.rows import UNLABELLED, Row, label_table, row_values
from narrowcast.workloads.genomics.models.config import PRESETS, GenomicConfig
from narrowcast.workloads.genomics.models.model import GenomicModel, Network
from narrowcast.workloads.genomics.models.patches import ByteLM, threshold_for, train_byte_lm
from narrowcast.workloads.genomics.network_info import (
    NetworkInfo,
    load_into,
    read_network_info,
    read_weights,
)
from narrowcast.workloads.genomics.sequences.alphabets import ALPHABETS
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer, make_tokenizer
from narrowcast.workloads.genomics.settings import GenomicData, GenomicModelSection, Objective
from narrowcast.workloads.genomics.targets import (
    EveryLetter,
    Labels,
    NextToken,
    OneClass,
    Target,
    Value,
)

LETTERS_FOR_PATCHES = 2**17
"""Training letters that the byte model of entropy patches is trained on."""
SOURCE_STEPS = 300
SOURCE_ROWS = 32
SOURCE_LR = 1e-3
SOURCE_CLIP_NORM = 1.0


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """A network with its training and evaluation data."""

    network: Network
    tokenizer: Tokenizer
    target: Target
    train: Examples
    validation: Examples
    test: Examples | None
    source: tuple[Examples, Examples] | None
    info: NetworkInfo
    unit: str
    letters: Tensor
    """Single-letter tokens to draw mutations from, on the device so that no step copies them."""
    notes: tuple[str, ...]


def build_parts(recipe: Recipe, *, device: torch.device) -> Parts:
    """Read the data and build the network on `device`; on the meta device only its shapes."""
    data, objective = recipe.section(GenomicData), recipe.section(Objective)
    path = recipe.section(GenomicModelSection).path
    base = read_network_info(path)[0] if path else None
    if base is not None:
        _check_base(base, data, objective)
    tokenizer = make_tokenizer(data.tokenizer, ALPHABETS[data.alphabet], data.kmer, data.overlap)
    rows = examine(data, objective, seed=recipe.seed)
    target = make_target(objective, rows, tokenizer)
    sets = {
        name: as_examples(part, tokenizer, objective, rows.classes)
        for name, part in rows.parts.items()
    }
    width = max(part.width for part in sets.values())
    sets = {name: replace(part, width=width) for name, part in sets.items()}
    stored = _network_info(recipe, tokenizer, target, rows, width=width, base=base)
    _check_strands(stored)
    byte_lm = None
    if stored.config.patching == "entropy" and base is None and device.type != "meta":
        byte_lm, stored = _find_patches(sets["train"], stored, seed=recipe.seed)
    network = make_network(
        stored, tokenizer, target, seed=recipe.seed, device=device, byte_lm=byte_lm
    )
    source = (sets["source"], sets["source validation"]) if "source" in sets else None
    notes = list(rows.notes)
    if device.type != "meta":
        notes += _begin(network, recipe, base, stored, target=target, source=source)
    return Parts(
        network=network,
        tokenizer=tokenizer,
        target=target,
        train=sets["train"],
        validation=sets["validation"],
        test=sets.get("test"),
        source=source,
        info=stored,
        unit=_unit(data),
        letters=torch.from_numpy(tokenizer.encode(ALPHABETS[data.alphabet].letters)).to(device),
        notes=tuple(notes),
    )


def make_target(objective: Objective, rows: Examined, tokenizer: Tokenizer) -> Target:
    """Return the target of a recipe; raise if the training data cannot teach it."""
    train, classes, smoothing = rows.parts["train"], rows.classes, objective.label_smoothing
    match objective.task, objective.target:
        case "generation", _:
            return NextToken(vocab_size=tokenizer.vocab_size, unknown=tokenizer.unknown_id)
        case "annotation", _:
            matches = {int(label) for row in train for label in _extremes(row)}
            if len(matches) < 2:
                only = "".join(classes[label] for label in matches)
                raise _nothing_to_learn(f"the class {only}" if only else "no class", of="letters")
            return EveryLetter(classes=classes, smoothing=smoothing)
        case _, "value":
            values = row_values(train).astype(np.float64)
            if not np.ptp(values):
                raise _nothing_to_learn(f"the value {train[0].label}")
            return Value(centre=float(values.mean()), spread=float(values.std()))
        case _, "labels":
            for part in ("train", "validation", "source validation"):
                table = label_table(rows.parts.get(part, []), classes)
                if part in rows.parts and not np.ptp(table, axis=0).any():
                    raise _nothing_to_learn(f"the labels {rows.parts[part][0].label!r} ({part})")
            return Labels(classes=classes)
        case _:
            if len({row.label for row in train}) < 2:
                raise _nothing_to_learn(f"the class {train[0].label}")
            return OneClass(classes=classes, smoothing=smoothing)


def _extremes(row: Row) -> list[int]:
    """Return the smallest and the largest class among the letters of a row."""
    assert row.letters is not None
    known = row.letters[row.letters != UNLABELLED]
    return [known.min(), known.max()] if len(known) else []


def _nothing_to_learn(what: str, *, of: str = "sequences") -> ConfigError:
    return ConfigError(
        f"All training {of} have {what}, so there is nothing to learn. Add other examples, or "
        "name another column with data.label."
    )


def _unit(data: GenomicData) -> str:
    """Return the unit that a run counts."""
    if data.tokenizer == "kmer":
        return "token"
    return "residue" if data.alphabet == "protein" else "base"


def _find_patches(train: Examples, saved: NetworkInfo, *, seed: int) -> tuple[ByteLM, NetworkInfo]:
    """Train the byte model of entropy patches and choose its threshold."""
    letters = torch.from_numpy(train.tokens.values[:LETTERS_FOR_PATCHES].astype(np.int64))
    generator = torch.Generator().manual_seed(seed)
    model = train_byte_lm(letters, vocab_size=saved.config.vocab_size, generator=generator)
    doubt = model.entropy(letters[None])
    threshold = threshold_for(doubt, patch_size=saved.config.patch_size)
    return model, replace(saved, config=replace(saved.config, entropy_threshold=threshold))


def make_network(
    stored: NetworkInfo,
    tokenizer: Tokenizer,
    target: Target,
    *,
    seed: int,
    device: torch.device,
    byte_lm: ByteLM | None = None,
) -> Network:
    """Return a network with weights drawn from the seed on the CPU, the same on every device."""
    # Of k-mers, the other strand has others where letters are left over.
    table = tokenizer.complement if tokenizer.width == 1 else None
    complement = None if table is None else table.tolist()
    with torch.random.fork_rng([]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.manual_seed(seed)
        backbone = GenomicModel(stored.config, complement=complement, byte_lm=byte_lm)
        width = stored.config.width * (2 if stored.pairs else 1)
        # A token has a letter or more, so that there are no more tokens than letters.
        length, dropout = stored.max_length, stored.config.dropout
        head = target.head(width, pool=stored.pool, dropout=dropout, length=length)
        return Network(backbone, head).to(device)


def _network_info(
    recipe: Recipe,
    tokenizer: Tokenizer,
    target: Target,
    rows: Examined,
    *,
    width: int,
    base: NetworkInfo | None,
) -> NetworkInfo:
    """Return what is saved next to the weights for predictions."""
    data, objective = recipe.section(GenomicData), recipe.section(Objective)
    model = recipe.section(GenomicModelSection)
    value = target if isinstance(target, Value) else Value()
    return NetworkInfo(
        config=_config(model, objective, vocab_size=tokenizer.vocab_size, length=width)
        if base is None
        else replace(base.config, dropout=model.dropout),
        alphabet=data.alphabet,
        tokenizer=data.tokenizer,
        kmer=data.kmer,
        overlap=data.overlap,
        task=objective.task,
        target=objective.target,
        classes=rows.classes,
        pairs=bool(rows.parts["train"][0].alternative),
        pool=model.pool,
        max_length=data.max_length,
        centre=value.centre,
        spread=value.spread,
    )


def _config(
    model: GenomicModelSection, objective: Objective, *, vocab_size: int, length: int
) -> GenomicConfig:
    """Return the config of a new network: the preset, overridden by the recipe."""
    shape = dict(PRESETS[model.preset])
    named = {field.name for field in fields(GenomicConfig)}
    requested = {key: value for key, value in model.model_dump().items() if key in named}
    shape |= {key: value for key, value in requested.items() if value is not None}
    # Filters fade over the length that there is: over a longer one, near letters look alike.
    shape |= {"max_length": length, "vocab_size": vocab_size}
    return GenomicConfig(**{**shape, "causal": objective.task == "generation"})


def _check_base(base: NetworkInfo, data: GenomicData, objective: Objective) -> None:
    """Check that the network of model.path has the recipe's tokens and can do its task."""
    for key in ("alphabet", "tokenizer", "kmer", "overlap"):
        mine, its = getattr(data, key), getattr(base, key)
        if mine != its and (key in ("alphabet", "tokenizer") or data.tokenizer == "kmer"):
            raise ConfigError(
                f"data.{key} must be {its} like the network of model.path, got {mine}. Write "
                f"data.{key}={its}, or use another run."
            )
    if objective.task == "generation" and not base.config.causal:
        raise ConfigError(
            "objective.task=generation needs a causal network, but the network of model.path was "
            f"trained for {base.task} and sees later letters. Use a run of `narrowcast genomics "
            "pretrain`."
        )


def _check_strands(stored: NetworkInfo) -> None:
    """Check that no classes differ by strand only in a strand-symmetric network."""
    if stored.task != "annotation" or not stored.config.reverse_complement:
        return
    for name in stored.classes:
        if name.endswith("+") and f"{name[:-1]}-" in stored.classes:
            raise ConfigError(
                f"model.reverse_complement=true cannot separate {name} and {name[:-1]}-, because "
                "the network gives both strands the same classes. Write "
                f"data.reverse_complement=true instead, or one class {name[:-1]} in "
                "objective.labels."
            )


def _begin(
    network: Network,
    recipe: Recipe,
    base: NetworkInfo | None,
    stored: NetworkInfo,
    *,
    target: Target,
    source: tuple[Examples, Examples] | None,
) -> Iterator[str]:
    """Load or train the starting weights; yield notes about them."""
    if base is not None:
        name = recipe.section(GenomicModelSection).path
        places = ["max_length"] if stored.pool == "position" else []
        same = ("target", "classes", "pairs", "pool", *places)
        alike = all(getattr(base, key) == getattr(stored, key) for key in same)
        head = base.task != "generation" and alike
        load_into(network, read_weights(expand_path(name)), head=head)
        yield f"weights loaded from {name}{'' if head else ', with a new head'}"
    elif source is not None:
        device = next(network.parameters()).device
        learn_source(network, target, source[0], seed=recipe.seed, device=device)
        yield f"network trained on {len(source[0]):,} source-domain sequences first"
    elif recipe.section(Objective).task == "domain_adaptation":
        raise ConfigError(
            "objective.task=domain_adaptation needs a source domain. Write a finished run in "
            "model.path, or sequences of the source domain in data.source."
        )


def learn_source(
    network: nn.Module, target: Target, source: Examples, *, seed: int, device: torch.device
) -> None:
    """Train on the source domain in plain fp32; a large source is a run of its own (model.path)."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=SOURCE_LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, SOURCE_LR, total_steps=SOURCE_STEPS)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(seed)
        network.train()
        for _ in range(SOURCE_STEPS):
            rows = torch.randint(len(source), (SOURCE_ROWS,), generator=order).tolist()
            batch = on(device, source.__getitems__(rows))
            result = network(batch["tokens"], batch["mask"], batch.get("alternative"))
            optimizer.zero_grad()
            target.loss(result.float(), batch).backward()
            nn.utils.clip_grad_norm_(network.parameters(), SOURCE_CLIP_NORM)
            optimizer.step()
            schedule.step()
    optimizer.zero_grad()
