"""The task of fine-tuning: a language model, conversations, and the loss on what it should say."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.task import EvalBatches, Task
from narrowcast.workloads.sft.build import Parts, build_parts
from narrowcast.workloads.sft.calling import Batch
from narrowcast.workloads.sft.data.packing import IGNORED, Packs
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.models.results import weights_folder, write_models

LOSS, PERPLEXITY = Metric(name="loss"), Metric(name="perplexity")
ROWS_JUDGED = 64
"""Rows of training data that are judged where there is nothing to validate on."""
LOGIT_BYTES = 2**30
"""That an evaluation makes at once, in fp32."""
WEIGHT = "weight"
"""Of a batch: how much it counts among those of its step."""


def build_task(recipe: Recipe, *, device: torch.device) -> Task:
    """Return the task of fine-tuning a language model."""
    return FineTuning(recipe=recipe, parts=build_parts(recipe, device=device), device=device).task()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class FineTuning:
    """A language model, the conversations it learns, and what is left of it at the end."""

    recipe: Recipe
    parts: Parts
    device: torch.device

    def task(self) -> Task:
        """Return what the engine trains."""
        judge, networks = self.parts.judge, self.parts.networks
        judged = () if judge is None else judge.info_metrics()
        # The judge first: it is of the model without masks, as it is saved.
        hooks = [*(() if judge is None else judge.hooks())]
        hooks += [] if networks is None else [networks.hook]
        return Task(
            model=self.parts.model,
            train_data=self.parts.data.train,
            loss=self.loss,
            evaluate=self.evaluate,
            items=self.items,
            info=TaskInfo(
                unit="token", metrics=(LOSS, PERPLEXITY, *judged), notes=self.parts.notes
            ),
            gemm_rows=self.recipe.batch_size * self.recipe.section(SftData).max_seq_length,
            held_out=self.held_out(),
            data_digest=self.digest,
            prepare_microbatches=self.weigh,
            hooks=tuple(hooks),
            write_results=self.write_results,
            weights_path=weights_folder(self.recipe),
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of the tokens to learn, in nats, by what it counts."""
        loss: Tensor = model(**self.parts.calling.arguments(batch)).loss
        return loss * batch[WEIGHT] if WEIGHT in batch else loss

    def weigh(self, batches: Sequence[Batch]) -> list[Batch]:
        """Let every token to learn count alike, in whichever micro-batch of a step it is.

        The mean of means would let those of a batch with few of them count for more.
        """
        if len(batches) == 1:
            return list(batches)
        learnt = torch.stack([(batch["labels"] != IGNORED).sum() for batch in batches]).float()
        shares = learnt / learnt.mean()
        return [{**batch, WEIGHT: shares[i]} for i, batch in enumerate(batches)]

    def items(self, batch: Batch) -> int:
        """Count the tokens of the conversations of a batch, without what fills its rows up."""
        tokens, learnt = batch["input_ids"], batch["labels"] != IGNORED
        said = (tokens != self.parts.data.train.padding) | learnt
        places = torch.arange(1, tokens.shape[1] + 1)
        return int((said * places).amax(1).sum())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return nats a token of held-out responses, their perplexity, and what a judge measures.

        Waits for the device.
        """
        measured, judge = self._measured(model), self.parts.judge
        return measured if judge is None else measured | judge.metrics(model)

    def _measured(self, model: nn.Module) -> dict[str, float]:
        nats, tokens = torch.zeros((), dtype=torch.float64), 0
        for batch in self._held_out():
            learnt = int((batch["labels"] != IGNORED).sum())
            on_device = {name: tensor.to(self.device) for name, tensor in batch.items()}
            nats += self.loss(model, on_device).cpu().double() * learnt
            tokens += learnt
        loss = nats / tokens
        return {"loss": loss.item(), "perplexity": loss.exp().item()}

    def digest(self) -> str:
        """Identify the tokens to train and to judge on."""
        judge, own = self.parts.judge, self.parts.data.digest()
        return own if judge is None else f"{own} {judge.digest()}"

    def write_results(self, folder: Path, prepared: Prepared) -> None:
        """Write folders that transformers and peft load, networks, and what a judge has to say."""
        write_models(folder, prepared, self.recipe, tokenizer=self.parts.tokenizer)
        model, judge, networks = prepared.model, self.parts.judge, self.parts.networks
        with torch.no_grad(), in_eval_mode(model), prepared.autocast():
            if networks is not None:
                networks.write(folder, lambda: self._measured(model))
            if judge is not None:
                with contextlib.nullcontext() if networks is None else networks.lifted():
                    judge.after(model, folder)

    @property
    def _rows_at_once(self) -> int:
        """Rows whose logits an evaluation can hold: it has them all, where a step may not."""
        length = self.recipe.section(SftData).max_seq_length
        return max(1, LOGIT_BYTES // (4 * length * self.parts.vocabulary))

    def held_out(self) -> EvalBatches | None:
        """Return the rows that are judged, as many a part as are passed at once; none on meta."""
        judged, count, size = self._judged()
        if not count:
            return None

        def loss(model: nn.Module, part: int) -> Tensor:
            rows = list(range(part * size, min((part + 1) * size, count)))
            batch = judged.__getitems__(rows)
            return self.loss(model, {name: t.to(self.device) for name, t in batch.items()})

        return EvalBatches(parts=-(-count // size), headline=loss)

    def _held_out(self) -> Iterator[Batch]:
        judged, count, size = self._judged()
        for first in range(0, count, size):
            yield judged.__getitems__(list(range(first, min(first + size, count))))

    def _judged(self) -> tuple[Packs, int, int]:
        """Return what an evaluation looks at, how many rows of it, and how many at once."""
        held, size = self.parts.data.validation, min(self.recipe.batch_size, self._rows_at_once)
        judged = self.parts.data.train if held is None else held
        return judged, min(len(judged), ROWS_JUDGED) if held is None else len(judged), size
