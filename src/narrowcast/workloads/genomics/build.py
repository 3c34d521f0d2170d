"""Build the data, the targets and the network that a genomics recipe describes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.workloads.genomics.baselines import (
    MOST_LABELS,
    Baselines,
    equal_length,
    fit_baselines,
)
from narrowcast.workloads.genomics.data.examples import Examples, Ragged, on
from narrowcast.workloads.genomics.data.preparing import Examined, as_examples, examine
from narrowcast.workloads.genomics.data.rows import UNLABELLED, Row, label_table, row_values
from narrowcast.workloads.genomics.models.config import PRESETS, GenomicConfig
from narrowcast.workloads.genomics.models.model import GenomicModel, Network
from narrowcast.workloads.genomics.models.motif import REACH, MotifModel
from narrowcast.workloads.genomics.models.patches import ByteLM, threshold_for, train_byte_lm
from narrowcast.workloads.genomics.network_info import (
    PUBLISHED,
    NetworkInfo,
    load_into,
    read_network_info,
    read_run,
)
from narrowcast.workloads.genomics.published.checkpoint import (
    Checkpoint,
    find_checkpoint,
    read_checkpoint,
)
from narrowcast.workloads.genomics.published.hyenadna import hyenadna_config, hyenadna_weights
from narrowcast.workloads.genomics.published.transformer import (
    PublishedTokenizer,
    Transformer,
    add_lora,
    build_transformer,
    load_published,
)
from narrowcast.workloads.genomics.sequences.alphabets import ALPHABETS
from narrowcast.workloads.genomics.sequences.operations import reverse_complement
from narrowcast.workloads.genomics.sequences.tokenizers import Tokenizer, make_tokenizer
from narrowcast.workloads.genomics.settings import (
    GenomicData,
    GenomicLora,
    GenomicModelSection,
    Objective,
    Tuning,
)
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
LONGEST_FOR_MOTIFS = 4096
"""Longest sequences that model.backbone=auto has a motif network for."""
MOTIF_KERNEL = 15
LETTERS_PER_POOLED, MOST_POOLED = 32, 4
"""A motif network pools one letter more for every so many it reads, up to the most."""
MUTATED_ALIGNED, MUTATED = 0.1, 0.05
"""Share of letters replaced with data.mutate=auto; more of them would break motifs."""
FEWEST_PER_EPOCH = 4096
"""Sequences that a classifier reads per epoch; smaller training sets are read several times."""
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
    complement: Tensor | None = None
    """Complement of each token, for a classifier whose labels do not depend on the strand."""
    baselines: Baselines | None = None
    """Linear models beside a classifier, on the device."""
    published: Checkpoint | None = None
    """The published transformer that the network has, directly or from an earlier run."""
    published_weights: bool = False
    """Whether all weights start from a published checkpoint."""


def build_parts(recipe: Recipe, *, device: torch.device) -> Parts:
    """Read the data and build the network on `device`; on the meta device only its shapes."""
    data, objective = recipe.section(GenomicData), recipe.section(Objective)
    tokenizer = make_tokenizer(data.tokenizer, ALPHABETS[data.alphabet], data.kmer, data.overlap)
    base, published = _read_base(recipe, tokenizer)
    if base is not None:
        _check_base(base, data, objective)
    rows = examine(data, objective, seed=recipe.seed)
    target = make_target(objective, rows, tokenizer)
    _check_motif(recipe, objective)
    sets = {
        name: as_examples(part, tokenizer, objective, rows.classes)
        for name, part in rows.parts.items()
    }
    width = max(part.width for part in sets.values())
    sets = {name: replace(part, width=width) for name, part in sets.items()}
    longest = max(part.tokens.longest for part in sets.values())
    if base is not None and base.config.filter_shift and longest > base.config.max_length:
        raise ConfigError(
            f"model.path={recipe.section(GenomicModelSection).path} reads at most "
            f"{base.config.max_length:,} letters, got a sequence of {longest:,}. Write "
            f"data.max_length={base.config.max_length}."
        )
    baselines = None
    if objective.baseline != "none" and device.type != "meta":
        baselines = _baselines(sets["train"], sets["validation"], target, tokenizer)
    if objective.task == "classify":
        train = sets["train"]
        sets["train"] = replace(train, repeats=-(-FEWEST_PER_EPOCH // len(train)))
    strands = _both_strands(recipe, baselines)
    cut = 0
    if published is not None:
        reader = PublishedTokenizer(published, tokenizer.alphabet)
        sets = {
            name: retokenized(part, rows.parts[name], reader, strands=strands)
            for name, part in sets.items()
        }
        width = max(part.width for part in sets.values())
        sets = {name: replace(part, width=width) for name, part in sets.items()}
        cut = sum(reader.count_cut(part.tokens) for part in sets.values())
    stored = _network_info(
        recipe,
        tokenizer,
        target,
        rows,
        train=sets["train"],
        base=base,
        published=published,
        baselines=baselines,
    )
    _check_strands(stored)
    byte_lm = None
    if stored.config.patching == "entropy" and base is None and device.type != "meta":
        byte_lm, stored = _find_patches(sets["train"], stored, seed=recipe.seed)
    transformer = None if published is None else build_transformer(published, device=device)
    network = make_network(
        stored,
        tokenizer,
        target,
        seed=recipe.seed,
        device=device,
        byte_lm=byte_lm,
        transformer=transformer,
    )
    if baselines is not None and base is None and isinstance(network.backbone, MotifModel):
        network.backbone.start_from(baselines.strongest_kmers(stored.config.width // 3))
    source = (sets["source"], sets["source validation"]) if "source" in sets else None
    notes = [
        *rows.notes,
        *_classify_notes(recipe, stored, baselines, repeats=sets["train"].repeats),
    ]
    if cut:
        notes.append(f"{cut:,} sequences were cut to the longest that the checkpoint reads")
    if device.type != "meta":
        if base is None and published is not None and transformer is not None:
            load_published(transformer, published)
            notes.append(f"weights loaded from {published.name}, with a new head")
        else:
            notes += _begin(network, recipe, base, stored, target=target, source=source)
    if stored.lora_scale:
        notes.append(_add_lora(network, recipe))
    return Parts(
        network=network,
        tokenizer=tokenizer,
        target=target,
        train=sets["train"],
        validation=sets["validation"],
        test=sets.get("test"),
        source=source,
        info=stored,
        unit="token" if published is not None else _unit(data),
        letters=torch.from_numpy(tokenizer.encode(ALPHABETS[data.alphabet].letters)).to(device),
        notes=tuple(notes),
        complement=torch.from_numpy(tokenizer.complement).to(device)
        if stored.both_strands and tokenizer.complement is not None and published is None
        else None,
        published=published,
        published_weights=not stored.lora_scale
        and (base is None or base.config.gelu == "tanh")
        and bool(recipe.section(GenomicModelSection).path),
        baselines=None if baselines is None else baselines.to(device),
    )


def _read_base(
    recipe: Recipe, tokenizer: Tokenizer
) -> tuple[NetworkInfo | None, Checkpoint | None]:
    """Return the run or HyenaDNA of model.path, and the published transformer that it is or has."""
    path = recipe.section(GenomicModelSection).path
    if not path:
        return None, None
    published = find_checkpoint(path)
    base = None
    if published is not None and published.family == "hyenadna":
        return _hyenadna(published, tokenizer, recipe.section(GenomicData)), None
    if published is None:
        base, folder = read_network_info(path)
        if base.config.backbone == "published":
            published = read_checkpoint(folder / PUBLISHED, name=path)
    if published is not None and recipe.section(Objective).task != "classify":
        raise ConfigError(
            f"model.path={path} is a published checkpoint, which only classify can fine-tune, got "
            f"objective.task={recipe.section(Objective).task}. Use the recipe genomics/classify."
        )
    if published is not None and recipe.section(GenomicData).mutate not in ("auto", 0):
        raise ConfigError(
            f"data.mutate replaces letters, but model.path={path} reads tokens of its own. Leave "
            "data.mutate out."
        )
    if recipe.section(GenomicModelSection).tune == "lora" and recipe.section(Tuning).freeze:
        raise ConfigError(
            "tuning.freeze=true would also freeze the adapters of model.tune=lora. Leave one of "
            "them out."
        )
    return base, published


def _hyenadna(published: Checkpoint, tokenizer: Tokenizer, data: GenomicData) -> NetworkInfo:
    """Return what a run that trained a HyenaDNA checkpoint would say of it."""
    if data.alphabet != "dna" or data.tokenizer != "byte":
        raise ConfigError(
            f"data.alphabet must be dna and data.tokenizer byte for model.path={published.name}, "
            f"got {data.alphabet} and {data.tokenizer}. Leave both out."
        )
    return NetworkInfo(
        config=hyenadna_config(published, tokenizer),
        alphabet="dna",
        tokenizer="byte",
        kmer=data.kmer,
        overlap=data.overlap,
        task="generation",
        target="class",
        classes=(),
        pairs=False,
        pool="mean",
        max_length=published.config["max_seq_len"],
    )


def retokenized(
    letters: Examples, rows: Sequence[Row], tokenizer: PublishedTokenizer, *, strands: bool
) -> Examples:
    """Return examples in tokens of a published checkpoint; with `strands`, both strands."""
    texts, opposite = [row.sequence for row in rows], None
    if strands:
        turned = [reverse_complement(text, tokenizer.alphabet) for text in texts]
        opposite = Ragged.joined(tokenizer.encode(turned), np.int32)
    examples = replace(
        letters,
        tokens=Ragged.joined(tokenizer.encode(texts), np.int32),
        letters=letters.tokens,
        opposite=opposite,
        padding=tokenizer.pad_id,
    )
    return replace(examples, width=examples.common_width)


def _both_strands(recipe: Recipe, baselines: Baselines | None) -> bool:
    """Return whether a classifier counts both strands the same."""
    strands = recipe.section(GenomicData).reverse_complement
    if strands == "auto":
        strands = baselines is not None and baselines.both_strands
    return bool(strands) and recipe.section(Objective).task == "classify"


def _add_lora(network: Network, recipe: Recipe) -> str:
    """Add adapters to the backbone; return a note."""
    settings = recipe.section(GenomicLora)
    with torch.random.fork_rng([]):
        torch.manual_seed(recipe.seed)
        count = add_lora(
            network.backbone,
            rank=settings.lora_r,
            alpha=settings.lora_alpha,
            dropout=settings.lora_dropout,
            targets=settings.lora_target_modules,
        )
    return f"LoRA adapters of rank {settings.lora_r} on {count} linear layers"


def _check_motif(recipe: Recipe, objective: Objective) -> None:
    """Check that a network or pooling that has no state per letter is not asked for letters."""
    model = recipe.section(GenomicModelSection)
    if model.backbone == "auto" and objective.task != "classify":
        raise ConfigError(
            f"model.backbone=auto is only for classify, got objective.task={objective.task}. Write "
            "hyena, attention, cnn or motif."
        )
    if model.backbone not in ("motif", "auto"):
        return
    if objective.reads_genomes:
        raise ConfigError(
            f"model.backbone=motif has no state per letter, which {objective.task} needs. Write "
            "hyena, attention or cnn."
        )
    for name, plain in (("patching", "none"), ("reverse_complement", False)):
        if getattr(model, name) != plain:
            raise ConfigError(
                f"model.{name} is not supported by model.backbone={model.backbone}, got "
                f"{getattr(model, name)}. Leave it out, or write model.backbone=hyena."
            )


def _baselines(
    train: Examples, validation: Examples, target: Target, tokenizer: Tokenizer
) -> Baselines | None:
    """Fit the linear models of a classifier; None if there are too many labels."""
    assert isinstance(target, OneClass | Labels | Value)
    if isinstance(target, Labels) and target.outputs() > MOST_LABELS:
        return None
    alphabet = tokenizer.alphabet
    # RNA is transcribed from one strand.
    opposite = alphabet.complement if alphabet.name == "dna" else None
    return fit_baselines(
        train,
        validation,
        target,
        letters=len(alphabet.letters),
        first=tokenizer.vocab_size - len(alphabet.letters),
        complement=[alphabet.letters.index(opposite[each]) for each in alphabet.letters]
        if opposite
        else (),
    )


def _classify_notes(
    recipe: Recipe, stored: NetworkInfo, baselines: Baselines | None, *, repeats: int
) -> Iterator[str]:
    """Yield what was chosen by the data."""
    data, objective = recipe.section(GenomicData), recipe.section(Objective)
    if objective.task != "classify":
        return
    if baselines is None:
        if objective.baseline != "none" and len(stored.classes) > MOST_LABELS:
            yield f"no baseline: more than {MOST_LABELS} labels"
        return
    config = stored.config
    losses = ", ".join(f"{each.name} {each.loss:.4f}" for each in baselines)
    yield f"linear baselines, validation loss: {losses}"
    if data.mutate == "auto":
        share = mutated_share(recipe, baselines, published=config.backbone == "published")
        yield f"data.mutate=auto: {share:g}"
    if data.reverse_complement == "auto":
        how = "both strands alike" if stored.both_strands else "one strand"
        yield f"data.reverse_complement=auto: {how}"
    if repeats > 1:
        yield f"an epoch reads the training sequences {repeats} times"
    if recipe.section(GenomicModelSection).backbone == "auto" and config.backbone != "published":
        yield f"model.backbone=auto: {config.backbone}, for {config.max_length:,} letters"
    if config.window_end:
        yield (
            f"the network reads letters {config.window_start + 1:,} to {config.window_end:,}; all "
            "training sequences are the same before and after them"
        )


def mutated_share(recipe: Recipe, baselines: Baselines | None, *, published: bool) -> float:
    """Return the share of letters that are replaced in training."""
    data, objective = recipe.section(GenomicData), recipe.section(Objective)
    if data.mutate != "auto":
        return data.mutate
    if published:  # its tokens are not letters
        return 0.0
    # One residue can decide on a value.
    if data.alphabet == "protein" or objective.target == "value":
        return 0.0
    return MUTATED_ALIGNED if baselines is not None and baselines.aligned else MUTATED


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
    transformer: Transformer | None = None,
) -> Network:
    """Return a network with weights drawn from the seed on the CPU, the same on every device."""
    # Of k-mers, the other strand has others where letters are left over.
    table = tokenizer.complement if tokenizer.width == 1 else None
    complement = None if table is None else table.tolist()
    with torch.random.fork_rng([]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.manual_seed(seed)
        backbone: GenomicModel | MotifModel | Transformer
        if transformer is not None:
            backbone = transformer
        elif stored.config.backbone == "motif":
            backbone = MotifModel(stored.config, len(tokenizer.alphabet.letters))
        else:
            backbone = GenomicModel(stored.config, complement=complement, byte_lm=byte_lm)
        width = stored.config.width * (2 if stored.pairs else 1)
        # A token has a letter or more, so that there are no more tokens than letters.
        length, dropout = _positions(stored), stored.config.dropout
        head = target.head(width, pool=stored.pool, dropout=dropout, length=length)
        return Network(backbone, head).to(device)


def _positions(stored: NetworkInfo) -> int:
    """Return how many states the head has weights for, if it pools by position."""
    config = stored.config
    length = stored.max_length
    if stored.pool == "all":
        if not config.aligned:
            return 0
        length = config.max_length
    if config.backbone == "motif":
        read = config.window_end - config.window_start if config.window_end else length
        length = -(-read // config.pooling)
    return length


def _network_info(
    recipe: Recipe,
    tokenizer: Tokenizer,
    target: Target,
    rows: Examined,
    *,
    train: Examples,
    base: NetworkInfo | None,
    published: Checkpoint | None,
    baselines: Baselines | None,
) -> NetworkInfo:
    """Return what is saved next to the weights for predictions."""
    data, objective = recipe.section(GenomicData), recipe.section(Objective)
    model = recipe.section(GenomicModelSection)
    value = target if isinstance(target, Value) else Value()
    lora = recipe.section(GenomicLora)
    combined = objective.baseline == "combined" and baselines is not None
    return NetworkInfo(
        config=_base_config(
            model, objective, tokenizer, train=train, base=base, published=published
        ),
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
        both_strands=_both_strands(recipe, baselines),
        lora_scale=lora.lora_alpha / lora.lora_r if model.tune == "lora" else 0.0,
        linear=baselines.best.linear.features if combined and baselines is not None else None,
    )


def _base_config(
    model: GenomicModelSection,
    objective: Objective,
    tokenizer: Tokenizer,
    *,
    train: Examples,
    base: NetworkInfo | None,
    published: Checkpoint | None,
) -> GenomicConfig:
    """Return the config of the network of model.path, or of a new one."""
    if base is not None:
        return replace(base.config, dropout=model.dropout)
    if published is None:
        return _config(model, objective, vocab_size=tokenizer.vocab_size, train=train)
    return GenomicConfig(
        vocab_size=tokenizer.vocab_size,
        width=published.config["hidden_size"],
        layers=published.config["num_hidden_layers"],
        max_length=train.width,
        backbone="published",
        aligned=equal_length(train) > 0,
        dropout=model.dropout,
    )


def _config(
    model: GenomicModelSection, objective: Objective, *, vocab_size: int, train: Examples
) -> GenomicConfig:
    """Return the config of a new network: the preset, overridden by the recipe."""
    shape = dict(PRESETS[model.preset])
    named = {field.name for field in fields(GenomicConfig)}
    requested = {key: value for key, value in model.model_dump().items() if key in named}
    shape |= {key: value for key, value in requested.items() if value is not None}
    # Filters fade over the length that there is: over a longer one, near letters look alike.
    shape |= {"max_length": train.width, "vocab_size": vocab_size}
    if objective.task == "classify":
        shape |= _classify_shape(model, train)
    return GenomicConfig(**{**shape, "causal": objective.task == "generation"})


def _classify_shape(model: GenomicModelSection, train: Examples) -> dict[str, Any]:
    """Return what the training sequences decide: backbone, window, letters per state."""
    longest, length = train.tokens.longest, equal_length(train)
    if model.backbone not in ("motif", "auto") or (
        model.backbone == "auto" and longest > LONGEST_FOR_MOTIFS
    ):
        backbone = "hyena" if model.backbone == "auto" else model.backbone
        return {"backbone": backbone, "aligned": length > 0}
    start, end = 0, longest
    if length:
        table = train.tokens.values.reshape(-1, length)
        differ = np.flatnonzero((table != table[0]).any(0))
        start, end = max(int(differ[0]) - REACH, 0), min(int(differ[-1]) + 1 + REACH, length)
    return {
        "backbone": "motif",
        "aligned": length > 0,
        "kernel": MOTIF_KERNEL,
        "pooling": min(max((end - start) // LETTERS_PER_POOLED, 1), MOST_POOLED),
        "window_start": start if end - start < length else 0,
        "window_end": end if end - start < length else 0,
    }


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
    name = recipe.section(GenomicModelSection).path
    if base is not None and (published := find_checkpoint(name)) is not None:
        tokenizer = make_tokenizer("byte", ALPHABETS["dna"], 1, 0)
        load_into(network, hyenadna_weights(published, base.config, tokenizer), head=False)
        yield f"weights loaded from {name}, with a new head"
    elif base is not None:
        places = ["max_length"] if stored.pool == "position" else []
        same = ("target", "classes", "pairs", "pool", *places)
        alike = all(getattr(base, key) == getattr(stored, key) for key in same)
        head = base.task != "generation" and alike
        load_into(network, read_run(base, expand_path(name)), head=head)
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
