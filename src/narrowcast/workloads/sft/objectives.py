"""What a model is fine-tuned for: the loss of responses, or preferences between responses (DPO)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.hardware.randomness import preserve_rng
from narrowcast.precision.fused.linear_cross_entropy import linear_cross_entropy
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Metric
from narrowcast.training.data import batch_order
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.task import Hook, LossParts
from narrowcast.workloads.sft.attention import Batch, Calling
from narrowcast.workloads.sft.data.packing import IGNORED
from narrowcast.workloads.sft.data.preferences import PAIRED, PairedRows
from narrowcast.workloads.sft.data.prepare import PreparedData
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.settings import DpoSection

LOSS, PERPLEXITY = Metric(name="loss"), Metric(name="perplexity")
WEIGHT = "weight"
"""Key of a batch: its weight within the step."""
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
"""Names as in TRL: beta times the log-ratio to the reference, and how often chosen is higher."""
ROWS_JUDGED = 64
"""Training rows to evaluate on if there is no validation data."""
_TRIAL = 8
"""Tokens of the trial whether logits are what the head returns."""


class Objective(Protocol):
    """A loss on batches, and what is measured with it."""

    metrics: tuple[Metric, ...]
    loss_parts: tuple[str, ...]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | LossParts:
        """Return the mean loss of a batch."""
        ...

    def total(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss without its parts."""
        ...

    def weigh(self, batches: Sequence[Batch]) -> list[Batch]:
        """Weight the micro-batches of a step."""
        ...

    def terms(self, batch: Batch) -> Tensor:
        """Count what the loss is a mean of."""
        ...

    def items(self, batch: Batch) -> int:
        """Count the tokens of a batch without padding."""
        ...

    def measured(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the metrics over batches; synchronises."""
        ...

    def hooks(self) -> tuple[Hook, ...]:
        """Return hooks of the run."""
        ...


@final
class Responses:
    """The mean cross-entropy of the tokens with a loss."""

    metrics: tuple[Metric, ...] = (LOSS, PERPLEXITY)
    loss_parts: tuple[str, ...] = ()

    def __init__(self, calling: Calling, *, padding: int) -> None:
        self._calling, self._padding = calling, padding

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy, times the weight of the batch."""
        loss: Tensor = model(**self._calling.arguments(batch)).loss
        return loss * batch[WEIGHT] if WEIGHT in batch else loss

    def total(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss."""
        return self.loss(model, batch)

    def weigh(self, batches: Sequence[Batch]) -> list[Batch]:
        """Weight micro-batches by their tokens with a loss."""
        if len(batches) == 1:
            return list(batches)
        learnt = torch.stack([self.terms(batch) for batch in batches]).float()
        shares = learnt / learnt.mean()
        return [{**batch, WEIGHT: shares[i]} for i, batch in enumerate(batches)]

    def terms(self, batch: Batch) -> Tensor:
        """Count the tokens with a loss."""
        return (batch["labels"] != IGNORED).sum()

    def items(self, batch: Batch) -> int:
        """Count the tokens of a batch without padding."""
        tokens, learnt = batch["input_ids"], batch["labels"] != IGNORED
        said = (tokens != self._padding) | learnt
        places = torch.arange(1, tokens.shape[1] + 1)
        return int((said * places).amax(1).sum())

    def measured(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return loss and perplexity over all tokens."""
        nats, tokens = torch.zeros((), dtype=torch.float64), 0
        for batch in batches:
            learnt = int(self.terms(batch))
            nats += self.loss(model, batch).cpu().double() * learnt
            tokens += learnt
        loss = nats / tokens
        return {"loss": loss.item(), "perplexity": loss.exp().item()}

    def hooks(self) -> tuple[Hook, ...]:
        """Return no hooks."""
        return ()


class LogProbs:
    """Log-probabilities of responses, computed from hidden states where the head allows it."""

    def __init__(self, model: nn.Module, calling: Calling) -> None:
        """Look for the head and, unless on the meta device, check what follows it."""
        inner: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self._calling = calling
        head = inner.get_output_embeddings()
        matches: Iterator[tuple[nn.Module, str]] = (
            (module, name)
            for module in inner.modules()
            for name, each in module.named_children()
            if each is head
        )
        parent, name = next(matches, (inner, ""))
        self._parent: nn.Module = parent
        self._name: str = name
        self.without_logits = (
            type(head) is nn.Linear and bool(self._name) and self._are_plain(model, head)
        )

    @torch.no_grad()
    def _are_plain(self, model: nn.Module, head: nn.Linear) -> bool:
        """Return whether the model's logits are what its head returns, unscaled and uncapped."""
        device = head.weight.device
        if device.type == "meta":
            return True
        ids = torch.arange(_TRIAL, device=device)[None] % head.out_features
        places = torch.arange(_TRIAL, device=device)[None]
        arguments = self._calling.arguments({"input_ids": ids, "position_ids": places})
        with in_eval_mode(model):
            logits = model(**arguments).logits
            with self._head_removed():
                hidden = model(**arguments).logits
            return logits.shape[-1] == head.out_features and torch.equal(logits, head(hidden))

    @contextmanager
    def _head_removed(self) -> Iterator[None]:
        """Make the model return hidden states as its logits."""
        modules = self._parent._modules
        head = modules[self._name]
        modules[self._name] = nn.Identity()
        try:
            yield
        finally:
            modules[self._name] = head

    def of(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the fp32 log-probability of each response, (2, pairs)."""
        places, targets = batch["places"].flatten(), batch["targets"].flatten()
        arguments = self._calling.arguments(batch)
        if self.without_logits:
            with self._head_removed():
                hidden = model(**arguments).logits
            head = self._parent._modules[self._name]
            assert isinstance(head, nn.Linear)
            rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
            losses = linear_cross_entropy(rows, head, targets, reduction="none")
        else:
            logits = model(**arguments).logits
            rows = logits.reshape(-1, logits.shape[-1]).index_select(0, places)
            losses = F.cross_entropy(rows.float(), targets, ignore_index=IGNORED, reduction="none")
        return -losses.view(batch["targets"].shape).sum(-1)


@final
class Preferences:
    """Direct preference optimisation: the log-ratio to the model before training is the reward.

    A hook computes the reference log-probabilities before the first step, with the same formats as
    in training, for the pairs that the run uses. A checkpoint contains them.
    """

    loss_parts: tuple[str, ...] = REWARDS
    metrics: tuple[Metric, ...] = (
        LOSS,
        *(Metric(name=name, better="higher", ranked=False) for name in REWARDS[:2]),
        Metric(name=REWARDS[2], better="higher"),
        Metric(name=REWARDS[3], better="higher", text=".1%"),
    )

    def __init__(
        self,
        section: DpoSection,
        log_probs: LogProbs,
        *,
        train: PairedRows,
        held: PairedRows | None,
        judged: int,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        """Prepare a table of references; `judged` training pairs are evaluated without `held`."""
        self._section, self._log_probs, self._recipe = section, log_probs, recipe
        self._train, self._held, self._judged, self._device = train, held, judged, device
        count = len(train) + (0 if held is None else len(held))
        self._reference = torch.full((2, count), torch.nan, device=device)
        """By the number of the pair; validation pairs follow the training pairs."""

    def loss(self, model: nn.Module, batch: Batch) -> LossParts:
        """Return the mean loss over pairs, and their rewards."""
        log_probs = self._log_probs.of(model, batch)
        ratios = log_probs - self._reference[:, batch["pairs"]]
        lengths = (batch["targets"] != IGNORED).sum(-1)
        losses = preference_loss(ratios, lengths, self._section)
        total = losses.mean()
        if self._section.sft_weight:
            total = total - self._section.sft_weight * log_probs[0].sum() / lengths[0].sum()
        chosen, rejected = rewards = ratios.detach() * self._section.beta
        margins = chosen - rejected
        numbers = (*rewards.mean(1), margins.mean(), (margins > 0).float().mean())
        return LossParts(total=total, parts=dict(zip(REWARDS, numbers, strict=True)))

    def total(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over pairs."""
        return self.loss(model, batch).total

    def weigh(self, batches: Sequence[Batch]) -> list[Batch]:
        """Leave micro-batches alone: each has as many pairs."""
        return list(batches)

    def terms(self, batch: Batch) -> Tensor:
        """Count pairs."""
        return torch.full((), len(batch["pairs"]), device=batch["pairs"].device)

    def items(self, batch: Batch) -> int:
        """Count the tokens of both conversations."""
        numbers = batch["pairs"].tolist()
        return sum(int(self._train.rows.lengths[2 * n + side]) for n in numbers for side in (0, 1))

    def measured(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the loss and rewards over all pairs."""
        sums, pairs = torch.zeros(1 + len(REWARDS), dtype=torch.float64), 0
        for batch in batches:
            count, loss = len(batch["pairs"]), self.loss(model, batch)
            sums += torch.stack([loss.total, *loss.parts.values()]).cpu().double() * count
            pairs += count
        return dict(zip(("loss", *REWARDS), (sums / pairs).tolist(), strict=True))

    def hooks(self) -> tuple[Hook, ...]:
        """Return the hook that computes and saves the reference."""
        return (
            Hook(
                name="reference",
                before_first_step=self._begin,
                state_dict=lambda: {"log_probs": self._reference},
                load_state_dict=self._load,
            ),
        )

    def _needed(self) -> list[int]:
        """Return the numbers of the pairs that the run uses."""
        recipe, train = self._recipe.for_samples(len(self._train)), len(self._train)
        order = batch_order(train, recipe)
        batches = recipe.steps * recipe.gradient_accumulation_steps
        if batches >= order.batches_per_epoch:
            used = set(range(train))
        else:
            used = {n for batch in islice(order.starting_at(0), batches) for n in batch}
        used |= set(range(self._judged)) if self._held is None else set()
        return sorted(used) + list(range(train, self._reference.shape[1]))

    def _begin(self, prepared: Prepared) -> None:
        model, size = prepared.model, self._recipe.batch_size
        train = len(self._train)
        numbers = self._needed()
        parts = [[n for n in numbers if n < train], [n - train for n in numbers if n >= train]]
        with preserve_rng(self._device), in_eval_mode(model), prepared.autocast():
            for rows, part in zip((self._train, self._held), parts, strict=True):
                for first in range(0, len(part), size):
                    assert rows is not None
                    batch = rows.__getitems__(part[first : first + size])
                    batch = {name: each.to(self._device) for name, each in batch.items()}
                    values = self._log_probs.of(model, batch).float()
                    self._reference[:, batch["pairs"]] = values

    def _load(self, state: dict[str, Any]) -> None:
        saved = state["log_probs"].to(self._device)
        if saved.shape != self._reference.shape or saved[:, self._needed()].isnan().any():
            raise CheckpointError(
                f"The checkpoint lacks reference log-probabilities of pairs that steps="
                f"{self._recipe.steps} needs: they are computed before the first step, for the "
                "pairs of the run. Start a new run with more steps."
            )
        self._reference.copy_(saved)


def preference_loss(ratios: Tensor, lengths: Tensor, settings: DpoSection) -> Tensor:
    """Return each pair's loss.

    Args:
        ratios: Log-probabilities of chosen and rejected responses minus those of the reference,
            (2, pairs).
        lengths: Tokens of the responses, (2, pairs).
        settings: Kind of loss, beta and label smoothing.
    """
    beta, flipped = settings.beta, settings.label_smoothing
    chosen, rejected = ratios
    delta = chosen - rejected
    match settings.loss_type:
        case "hinge":
            return F.relu(1 - beta * delta)
        case "ipo":  # per token, as its authors have it
            means = ratios / lengths.clamp(min=1)
            return torch.square(means[0] - means[1] - 1 / (2 * beta))
        case "sigmoid_norm":
            means = ratios / lengths.clamp(min=1)
            return -F.logsigmoid(beta * (means[0] - means[1]))
        case "apo_zero":
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case "apo_down":
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * delta)
    right, wrong = F.logsigmoid(beta * delta), F.logsigmoid(-beta * delta)
    if settings.loss_type == "robust":
        return (flipped * wrong - (1 - flipped) * right) / (1 - 2 * flipped)
    return -(1 - flipped) * right - flipped * wrong


def has_preferences(recipe: Recipe) -> bool:
    """Return whether a recipe trains on preferences; raise if its data settings do not allow it."""
    data = recipe.section(SftData)
    if recipe.section(DpoSection).loss_type == "none":
        return False
    wrong = {
        "loss_on=all": data.loss_on == "all",
        "columns": data.columns.are_set,
        f"format={data.format}": data.format not in ("auto", *(each.name for each in PAIRED)),
    }
    for setting in (name for name, is_set in wrong.items() if is_set):
        raise ConfigError(
            "dpo.loss_type needs responses in the columns prompt, chosen and rejected, got "
            f"data.{setting}. Leave it out."
        )
    return True


def build_objective(
    recipe: Recipe, model: nn.Module, calling: Calling, data: PreparedData, *, device: torch.device
) -> tuple[Objective, list[str]]:
    """Return the objective of a recipe, and notes on it."""
    train, held = data.train, data.validation
    if not has_preferences(recipe):
        return Responses(calling, padding=train.padding), []
    if not isinstance(train, PairedRows):  # a plan
        train = PairedRows(rows=train.rows, padding=train.padding)
    assert held is None or isinstance(held, PairedRows)
    # Noise in a log-ratio to a reference without noise would be a reward.
    noisy = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout) and module.p and "lora_dropout" not in name
    ]
    for module in noisy:
        module.p = 0.0
    log_probs, section = LogProbs(model, calling), recipe.section(DpoSection)
    notes = [
        f"preferences with the {section.loss_type} loss, beta {section.beta:g}; the reference is "
        "this model before training, whose log-probabilities are computed once"
    ]
    if noisy:
        notes.append("the dropout of the base model is off")
    if not log_probs.without_logits:
        notes.append("the loss computes all logits, because of what the model does at its head")
    objective = Preferences(
        section,
        log_probs,
        train=train,
        held=held,
        judged=min(len(train), ROWS_JUDGED),
        recipe=recipe,
        device=device,
    )
    return objective, notes
