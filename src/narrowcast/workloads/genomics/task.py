"""The genomics task: training loss, parameter groups, evaluation and results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.task import ParameterGroup, Task
from narrowcast.workloads.genomics.build import Parts, build_parts, mutated_share
from narrowcast.workloads.genomics.data.examples import Batch, Examples, on
from narrowcast.workloads.genomics.models.combined import (
    Mix,
    letter_tokens,
    of_strands,
    other_strand,
)
from narrowcast.workloads.genomics.models.hyena import filter_parameters
from narrowcast.workloads.genomics.models.model import Network
from narrowcast.workloads.genomics.network_info import LINEAR_WEIGHTS, PUBLISHED
from narrowcast.workloads.genomics.results import (
    Classified,
    Judged,
    classified,
    salient_variants,
    verdicts,
    write_judged,
    written_samples,
)
from narrowcast.workloads.genomics.settings import Tuning
from narrowcast.workloads.genomics.targets import Labels, NextToken, OneClass, Predicted, Value

OF_SOURCE = "of_source"
"""Name of the headline metric on the source domain."""
PUBLISHED_LR = 1e-4
"""Largest learning rate of all weights of a published checkpoint."""
WEIGHT = "weight"
"""Batch key of its weight in the step."""
JUDGED_ROWS = 256
"""Sequences per batch of an evaluation of a classifier."""


def build_task(recipe: Recipe, *, device: torch.device) -> Task:
    """Return the task of a genomics recipe."""
    return Genomic(recipe=recipe, parts=build_parts(recipe, device=device), device=device).task()


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Genomic:
    """A network with its data."""

    recipe: Recipe
    parts: Parts
    device: torch.device
    verdict_lines: list[str] = field(default_factory=list)
    """How the results compare with the baselines, once they are written."""

    def task(self) -> Task:
        """Return the task for the trainer."""
        train, target = self.parts.train, self.parts.target
        passes = 1 if train.alternatives is None else 2
        return Task(
            model=self.parts.network,
            train_data=train,
            loss=self.loss,
            evaluate=self.evaluate,
            items=lambda batch: int(batch["mask"].sum()),
            info=TaskInfo(unit=self.parts.unit, metrics=self.metrics, notes=self.parts.notes),
            gemm_rows=max(1, self.recipe.batch_size * train.width * passes),
            data_digest=self.digest,
            prepare_microbatches=self.weigh if target.per_letter else None,
            loss_terms=target.count if target.per_letter else None,
            parameter_groups=self.parameter_groups,
            write_results=self.write_results,
            summary=lambda: self.verdict_lines,
        )

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        """Return the head at the full rate, then stages; the last stage is unfrozen first."""
        tuning = self.recipe.section(Tuning)
        *base, head = self.parts.network.stages()
        groups, seen = [ParameterGroup(parameters=list(head.parameters()))], set(head.parameters())
        for depth, stage in enumerate(reversed(base), start=1):
            fresh = [p for p in stage.parameters() if p not in seen and p.requires_grad]
            seen.update(fresh)
            share = tuning.unfreeze_over * depth / len(base)
            factor = self._base_lr_factor() * tuning.layerwise_decay**depth
            groups += self._stage(fresh, factor, frozen_until=share)
        return groups

    def _base_lr_factor(self) -> float:
        factor = self.recipe.section(Tuning).base_lr_factor
        if factor != "auto":
            return factor
        if not self.parts.published_weights:
            return 1.0
        return min(PUBLISHED_LR / max(self.recipe.optimizer.lr, PUBLISHED_LR), 1.0)

    def _stage(
        self, parameters: Sequence[nn.Parameter], lr_factor: float, *, frozen_until: float
    ) -> Iterator[ParameterGroup]:
        """Yield the groups of a stage; implicit filters get no weight decay."""
        frozen = self.recipe.section(Tuning).freeze
        filters = set(filter_parameters(self.parts.network))
        usual = [p for p in parameters if p not in filters]
        for decay, of in ((None, usual), (0.0, [p for p in parameters if p in filters])):
            if of:
                yield ParameterGroup(
                    parameters=of,
                    lr_factor=lr_factor,
                    weight_decay=decay,
                    frozen=frozen,
                    frozen_until=frozen_until,
                )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch in fp32, weighted in its step."""
        inputs = self._mutated(self._turned(batch)) if model.training else batch
        result = model(inputs["tokens"], inputs["mask"], inputs.get("alternative"))
        # What comes next is what came before anything was exchanged.
        loss = self.parts.target.loss(result.float(), batch)
        return loss * batch[WEIGHT] if WEIGHT in batch else loss

    def _turned(self, batch: Batch) -> Batch:
        """Read about half of the rows from the other strand, if strands count the same."""
        complement = self.parts.complement
        if complement is None and "opposite" not in batch:
            return batch
        tokens, mask = batch["tokens"], batch["mask"]
        chosen = torch.rand(len(tokens), 1, device=tokens.device) < 0.5
        if complement is None:
            return {
                **batch,
                "tokens": torch.where(chosen, batch["opposite"], tokens),
                "mask": torch.where(chosen, batch["opposite_mask"], mask),
            }
        other = other_strand(tokens, mask, complement)
        return {**batch, "tokens": torch.where(chosen, other, tokens)}

    def _mutated(self, batch: Batch) -> Batch:
        """Replace some letters at random, the same in both sequences of a pair."""
        parts = self.parts
        share = mutated_share(self.recipe, parts.baselines, published=parts.published is not None)
        letters = parts.letters
        if not share:
            return batch
        tokens, device = batch["tokens"], batch["tokens"].device
        drawn = letters[torch.randint(len(letters), tokens.shape, device=device)]
        chosen = (torch.rand(tokens.shape, device=device) < share) & batch["mask"]
        if "alternative" not in batch:
            return {**batch, "tokens": torch.where(chosen, drawn, tokens)}
        chosen &= tokens == batch["alternative"]  # not the variant itself
        pair = {key: torch.where(chosen, drawn, batch[key]) for key in ("tokens", "alternative")}
        return {**batch, **pair}

    def weigh(self, batches: Sequence[Batch]) -> list[Batch]:
        """Weight micro-batches so that every letter counts the same."""
        if len(batches) == 1:
            return list(batches)
        counts = torch.stack([self.parts.target.count(batch) for batch in batches]).float()
        shares = counts / counts.mean().clamp_min(1)
        return [{**batch, WEIGHT: shares[at]} for at, batch in enumerate(batches)]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics, with the headline on the source domain if there is one."""
        own = self.parts.target.metrics
        return own if self.parts.source is None else (*own, replace(own[0], name=OF_SOURCE))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Evaluate on validation, and on the source domain if there is one."""
        measured = self.judged(model, self.parts.validation).measured
        if self.parts.source is not None:
            headline = self.parts.target.metrics[0].name
            left = self.judged(model, self.parts.source[1]).measured
            measured[OF_SOURCE] = left[headline]
        return measured

    def judged(self, model: nn.Module, examples: Examples) -> Judged:
        """Return predictions with their metrics. Synchronises."""
        target = self.parts.target
        if self.parts.info.task == "classify":
            return self._classified(model, examples).judged
        predicted, truth, nats, count = list[Predicted](), list[Predicted](), 0.0, 0
        for batch in examples.batches(self.recipe.batch_size):
            there = on(self.device, batch)
            matched = model(there["tokens"], there["mask"], there.get("alternative")).float()
            counted = int(target.count(batch))
            nats += target.loss(matched, there).item() * counted
            count += counted
            predicted += target.predicted(matched, there)
            truth += target.truth(batch)
        loss = nats / max(count, 1)
        measured = target.measured(truth, predicted) | {"loss": loss}
        if any(metric.name == "perplexity" for metric in target.metrics):
            with np.errstate(over="ignore"):  # of a network that has diverged
                measured["perplexity"] = float(np.exp(loss))
        return Judged(measured=measured, truth=truth, predicted=predicted, names=examples.names)

    def _classified(
        self, model: nn.Module, examples: Examples, *, mix: Mix | None = None
    ) -> Classified:
        """Return the predictions of a classifier; without `mix`, it is chosen on `examples`."""
        parts, target = self.parts, self.parts.target
        assert isinstance(target, OneClass | Labels | Value)
        network, linear = list[Tensor](), dict[str, list[Tensor]]()
        for batch in examples.batches(JUDGED_ROWS):
            there = on(self.device, batch)
            result = of_strands(model, there, parts.complement)
            network.append(result.float())
            for each in parts.baselines or ():
                linear.setdefault(each.name, []).append(each.linear(letter_tokens(there)))
        return classified(
            torch.cat(network).cpu(),
            {name: torch.cat(outputs).cpu() for name, outputs in linear.items()},
            examples,
            target,
            combined=parts.baselines.best.name if parts.info.linear and parts.baselines else "",
            mix=mix,
        )

    def _write_classified(self, folder: Path, model: nn.Module, sets: dict[str, Examples]) -> None:
        """Write the results of a classifier, beside its baselines."""
        parts, target = self.parts, self.parts.target
        assert isinstance(target, OneClass | Labels | Value)
        results, mix = dict[str, Classified](), None
        for name, examples in sets.items():  # validation first, which chooses the weights
            results[name] = self._classified(model, examples, mix=mix)
            mix = results[name].mix
        info = parts.info if mix is None else replace(parts.info, mix=mix)
        info.write(folder)
        if parts.published is not None:
            parts.published.copy_description(folder / PUBLISHED)
        if parts.baselines is not None and info.linear is not None:
            save_file(parts.baselines.best.linear.state_dict(), folder / LINEAR_WEIGHTS)
        best = parts.baselines.best.name if parts.baselines is not None else ""
        pictures = {name: result.table(target, best) for name, result in results.items()}
        write_judged(folder, parts, {name: each.judged for name, each in results.items()}, pictures)
        self.verdict_lines[:] = verdicts(pictures)

    def digest(self) -> str:
        """Return a fingerprint of all data."""
        own = (self.parts.train, self.parts.validation, self.parts.test)
        parts = (*own, *(self.parts.source or ()))
        return " ".join(part.digest() for part in parts if part is not None)

    def write_results(self, folder: Path, prepared: Prepared) -> None:
        """Write genomics.json and the data of the report."""
        model = prepared.model
        sets = {"validation": self.parts.validation, "test": self.parts.test}
        there = {name: part for name, part in sets.items() if part is not None}
        if self.parts.info.task == "classify":
            with torch.no_grad(), in_eval_mode(model), prepared.autocast():
                self._write_classified(folder, model, there)
            return
        self.parts.info.write(folder)
        with torch.no_grad(), in_eval_mode(model), prepared.autocast():
            judged = {name: self.judged(model, part) for name, part in there.items()}
            pictures = {
                name: self._pictures(model, part, judged[name]) for name, part in there.items()
            }
        write_judged(folder, self.parts, judged, pictures)

    def _pictures(self, model: nn.Module, examples: Examples, judged: Judged) -> dict[str, Any]:
        """Return report data that needs the network."""

        def predict(batch: Batch) -> Tensor:
            there = on(self.device, batch)
            out: Tensor = model(there["tokens"], there["mask"], there.get("alternative"))
            return out.float()

        parts = self.parts
        if isinstance(parts.target, NextToken):
            assert isinstance(model, Network)
            info = written_samples(model, examples, parts.tokenizer, seed=self.recipe.seed)
            return {"written": info} if info else {}
        shown = salient_variants(predict, examples, judged, parts.tokenizer, parts.target)
        return {"saliency": shown} if shown else {}
