"""What a model forgets as it learns one task after another, by way of fine-tuning."""

import contextlib
import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, final, get_args

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.precision.step.prepared import prepare
from narrowcast.workloads.sft.data.formats import Conversation, Conversations
from narrowcast.workloads.sft.data.packing import Packs, alone
from narrowcast.workloads.sft.data.settings import Columns, SftData
from narrowcast.workloads.sft.data.sources import Row, read_rows
from narrowcast.workloads.sft.data.templates import Template
from narrowcast.workloads.sft.data.tokenised import (
    Encoder,
    Tally,
    TokenRows,
    filter_rows,
    padding_token,
)
from narrowcast.workloads.sft.ica.freeze import Freeze
from narrowcast.workloads.sft.ica.masks import Masks
from narrowcast.workloads.sft.ica.networks import Channels, Site
from narrowcast.workloads.sft.judge.exact_match import exact_match
from narrowcast.workloads.sft.judge.forgetting import Accuracies
from narrowcast.workloads.sft.judge.prompts import Question, make_question
from narrowcast.workloads.sft.models.base import add_adapters
from narrowcast.workloads.sft.settings import LoraSection

Method: TypeAlias = Literal["full", "lora", "freeze", "lesion", "preserve"]
METHODS: tuple[Method, ...] = get_args(Method)
NEEDS_NETWORKS: tuple[Method, ...] = ("freeze", "lesion", "preserve")
HELD_OUT = 0.2
"""Share of a task's rows that is asked about."""
MADE = ("sound", "half", "parity")
"""Tasks that the package makes, about letters: vowel or consonant, early or late, odd or even."""
WORDINGS = (
    "{name} {x}?", "{x}: {name}?", "The {name} of {x}?", "{name} of {x} is?",
    "{x} has which {name}?", "Give the {name} of {x}.", "Tell me the {name} of {x}.",
    "What is the {name} of {x}?", "Letter {x}, {name}?", "Which is the {name} of {x}?",
)  # fmt: skip
"""So that a held-out question is a new wording."""


@final
@dataclass(frozen=True, kw_only=True)
class TaskRows:
    """One task: rows to learn, and held-out questions."""

    name: str
    train: Packs
    questions: tuple[Question, ...]


@final
@dataclass(frozen=True, kw_only=True)
class TaskTraining:
    """How each task is learned."""

    steps: int = 100
    batch_size: int = 16
    lr: float = 1e-3
    lora_r: int = 8
    policy: str = "fp32"
    max_new_tokens: int = 16

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@final
@dataclass(frozen=True, kw_only=True)
class Learned:
    """What one method remembered."""

    method: Method
    seed: int
    tasks: tuple[str, ...]
    accuracies: Accuracies
    before: tuple[float, ...]
    """Accuracy on each task before training."""
    nats: tuple[float, float] | None
    """Loss per token of other text, before and after all tasks."""

    @property
    def forgetting(self) -> tuple[float, ...]:
        """Per task but the last: the best accuracy it ever had, minus that at the end."""
        matrix = self.accuracies.matrix
        return tuple(
            max(row[task] for row in matrix[task:]) - matrix[-1][task]
            for task in range(len(matrix) - 1)
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        accuracies = self.accuracies
        return {
            "method": self.method, "seed": self.seed, "tasks": list(self.tasks),
            "matrix": [list(row) for row in accuracies.matrix], "before": list(self.before),
            "average": accuracies.average, "backward_transfer": accuracies.backward_transfer,
            "forgetting": list(self.forgetting), "nats": self.nats and list(self.nats),
        }  # fmt: skip


def made_rows(name: str) -> list[Row]:
    """Return the rows of a task that the package makes: each letter in ten wordings."""
    letters = string.ascii_lowercase
    answers = {
        "sound": ["vowel" if x in "aeiou" else "consonant" for x in letters],
        "half": ["early" if n < 13 else "late" for n in range(26)],
        "parity": ["odd" if n % 2 == 0 else "even" for n in range(26)],
    }[name]
    pairs = [(text, *pair) for pair in zip(letters, answers, strict=True) for text in WORDINGS]
    return [
        Row({"question": text.format(name=name, x=x), "answer": answer}, f"{name}, row {number}")
        for number, (text, x, answer) in enumerate(pairs, 1)
    ]


def load_task(
    name: str, template: Template, *, most_questions: int, max_length: int, seed: int = 0
) -> TaskRows:
    """Return a task from a file of questions and answers, or one that the package makes."""
    rows = made_rows(name) if name in MADE else list(read_rows(Path(name)))
    read = list(Conversations(rows, "auto", Columns()))
    unique = list({_text(each): each for each in read}.values())
    order = np.random.default_rng(seed).permutation(len(unique)).tolist()
    held = min(most_questions, max(1, round(HELD_OUT * len(unique))))
    if len(unique) < 2:
        raise ConfigError(f"{name} must have at least two different rows, got {len(unique)}.")
    questions = tuple(make_question(unique[i], template) for i in order[:held])
    data, tally = SftData(path=name, max_seq_length=max_length), Tally()
    encoder = Encoder.of(template, data)
    learnt = encoder.rows(filter_rows((unique[i] for i in order[held:]), data, tally), tally)
    tokens = TokenRows.joined(list(learnt))
    if not len(tokens):
        raise ConfigError(f"{name}: no row fits into {max_length} tokens. Give shorter rows.")
    packs = Packs(
        rows=tokens,
        packs=alone(len(tokens)),
        padding=padding_token(template.tokenizer),
        width=None,
    )
    return TaskRows(name=Path(name).stem, train=packs, questions=questions)


def as_batches(rows: Sequence[Any], *, device: str) -> list[dict[str, Tensor]]:
    """Return rows of tokens as batches of one row, to find networks in."""
    return [{"input_ids": torch.tensor(row, device=device).long()[None]} for row in rows]


def _text(conversation: Conversation) -> str:
    return json.dumps([[turn.role, turn.whole] for turn in conversation.turns])


def continual(
    load: Callable[[], Any],
    template: Template,
    tasks: Sequence[TaskRows],
    *,
    method: Method,
    channels: Channels,
    site: Site,
    training: TaskTraining,
    seed: int = 0,
    nats: Callable[[nn.Module], float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Learned:
    """Learn tasks one after another and ask about all of them after each.

    Args:
        load: Returns the model as it was.
        template: Renders prompts.
        tasks: In the order in which they are learned.
        method: full trains all weights; lora an adapter; freeze, lesion and preserve all weights
            while the networks' rows are frozen, silent, or all that is not.
        channels: Channels of the networks.
        site: Where these channels are.
        training: Steps, batch size and learning rate.
        seed: Of rows and adapters.
        nats: Measures the loss on other text; masks are lifted.
        progress: Called with the tasks learned and their number.
    """
    torch.manual_seed(seed)
    model = load()
    if method == "lora":
        section = LoraSection(
            lora_r=training.lora_r, lora_alpha=2 * training.lora_r, lora_dropout=0
        )
        model = add_adapters(model, section, seed=seed)
    freeze = Freeze(model, channels, site=site) if method == "freeze" else None

    def accuracies() -> tuple[float, ...]:
        shares = [
            exact_match(
                model,
                template,
                task.questions,
                max_new_tokens=training.max_new_tokens,
                batch_size=64,
            ).share
            for task in tasks
        ]
        return tuple(shares)

    before, first = accuracies(), None if nats is None else nats(model)
    matrix = []
    for place, task in enumerate(tasks):
        with _masked(model, method, channels, site):
            _learn(model, task, training, freeze=freeze, seed=100 * seed + place)
        matrix.append(accuracies())
        if progress is not None:
            progress(place + 1, len(tasks))
    last = None if nats is None else nats(model)
    return Learned(
        method=method,
        seed=seed,
        tasks=tuple(task.name for task in tasks),
        accuracies=Accuracies(matrix=tuple(matrix)),
        before=before,
        nats=None if first is None or last is None else (first, last),
    )


@contextlib.contextmanager
def _masked(model: nn.Module, method: Method, channels: Channels, site: Site) -> Iterator[None]:
    """Silence what the method silences in training."""
    if method not in ("lesion", "preserve"):
        yield
        return
    with Masks(model, site=site) as masks:
        getattr(masks, method)(channels)
        yield


def _learn(
    model: Any, task: TaskRows, training: TaskTraining, *, freeze: Freeze | None, seed: int
) -> None:
    """Train on one task; schedule and optimizer begin anew."""
    chance = np.random.default_rng(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=training.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, training.steps, training.lr / 10
    )
    device = trained[0].device
    model.train()
    run = prepare(model, optimizer, policy=training.policy, clip_norm=1.0, scheduler=schedule)
    for _ in range(training.steps):
        batch = task.train.__getitems__(
            chance.integers(0, len(task.train), training.batch_size).tolist()
        )
        moved = {name: each.to(device) for name, each in batch.items() if name != "position_ids"}
        with run.autocast():
            loss = model(**moved, use_cache=False).loss
        run.step(loss)
        if freeze is not None:
            freeze.restore_in(run)
    run.release()


def summary(results: Sequence[Learned]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a table with one row per method, means over seeds."""
    has_text = any(each.nats for each in results)
    head = ["method", "average", "backward transfer", "forgetting"]
    head += [f"{task} at the end" for task in results[0].tasks]
    head += ["loss on text, before", "after"] if has_text else []
    rows = []
    by_method: dict[str, list[Learned]] = {}
    for each in results:
        by_method.setdefault(each.method, []).append(each)
    for method, own in by_method.items():

        def mean(of: Callable[[Learned], float], own: Sequence[Learned] = own) -> float:
            return float(np.mean([of(each) for each in own]))

        row = [method, f"{mean(lambda r: r.accuracies.average):.1%}"]
        row.append(f"{mean(lambda r: r.accuracies.backward_transfer):+.1%}")
        row.append(f"{mean(lambda r: float(np.mean(r.forgetting or (0.0,)))):.1%}")
        ends = np.mean([each.accuracies.matrix[-1] for each in own], 0)
        row += [f"{end:.1%}" for end in ends]
        if has_text:
            row += [f"{mean(lambda r, i=i: (r.nats or (0.0, 0.0))[i]):.4f}" for i in (0, 1)]  # type: ignore[misc]
        rows.append(row)
    return head, rows


def mean_matrices(results: Sequence[Learned]) -> Mapping[str, list[list[float]]]:
    """Return per method the accuracies on each task (columns) before and after each task (rows)."""
    by_method: dict[str, list[list[tuple[float, ...]]]] = {}
    for each in results:
        by_method.setdefault(each.method, []).append([each.before, *each.accuracies.matrix])
    return {method: np.mean(tables, 0).tolist() for method, tables in by_method.items()}
