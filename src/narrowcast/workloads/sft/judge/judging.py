"""Evaluation tasks of a run: what is measured, when, and the files it writes."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Metric, strict_json
from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.training.evaluation import in_eval_mode
from narrowcast.training.task import Hook
from narrowcast.workloads.sft.data.templates import Template
from narrowcast.workloads.sft.data.tokenised import TokenRows, padding_token
from narrowcast.workloads.sft.judge.exact_match import comparison_kind, exact_match
from narrowcast.workloads.sft.judge.generation import generate_as_saved
from narrowcast.workloads.sft.judge.perplexity import (
    Window,
    encode,
    make_windows,
    perplexity_of_windows,
    read_texts,
)
from narrowcast.workloads.sft.judge.prompts import Question, questions_from, sample_questions
from narrowcast.workloads.sft.judge.report import JUDGED, Sample, write_json, write_samples
from narrowcast.workloads.sft.judge.settings import USUAL_LENGTH, EvalTasksSection
from narrowcast.workloads.sft.models.loading import context_length

PERPLEXITY = Metric(name="text_perplexity")
EXACT_MATCH = Metric(name="exact_match", better="higher", text=".1%")
BYTES_A_TOKEN = 64
"""Bytes read per token; tokenizers need 3 to 5."""
PROBE = 32
"""Tokens for the fingerprint of a model."""


@final
class Judge:
    """Evaluates a model during and after a run, and writes samples before and after training."""

    def __init__(
        self,
        section: EvalTasksSection,
        template: Template,
        *,
        model: nn.Module,
        steps: int,
        eval_every: int = 0,
        shown: TokenRows | None = None,
    ) -> None:
        """Read and check texts and questions."""
        if section.every and (not eval_every or section.every % eval_every):
            raise ConfigError(
                f"eval_tasks.every must be a multiple of eval.every, got {section.every} and "
                f"{eval_every}. Write eval.every={section.every}, or a divisor of it."
            )
        self._section, self._template, self._steps = section, template, steps
        self._room = context_length(model)
        self._windows = self._text_windows()
        self._questions = self._load_questions()
        self._shown = self._samples(shown)
        self._step, self._before = 0, ""
        self._known: dict[str, dict[str, Any]] = {}

    def info_metrics(self) -> tuple[Metric, ...]:
        """Return the metrics that evaluations may have."""
        text = (PERPLEXITY,) if self._windows else ()
        return (*text, EXACT_MATCH) if self._questions else text

    def metrics(self, model: nn.Module) -> dict[str, float]:
        """Return the metrics if an evaluation is due, else nothing."""
        every = self._section.every
        due = self._step >= self._steps or (every > 0 and self._step % every == 0)
        results = self._judgement(model) if due else {}
        metrics = {}
        if "perplexity" in results:
            metrics[PERPLEXITY.name] = results["perplexity"]["perplexity"]
        if "exact_match" in results:
            metrics[EXACT_MATCH.name] = results["exact_match"]["share"]
        return metrics

    def before(self, model: nn.Module) -> None:
        """Measure the model and generate samples before the first step."""
        texts = self._answers(model)
        measured = self._judgement(model) if self._section.before else None
        self._before = strict_json.dumps({"texts": texts, "measured": measured})

    def after(self, model: nn.Module, folder: Path) -> None:
        """Write results and samples; an evaluation of the same weights is reused."""
        before = strict_json.loads(self._before) if self._before else {}
        if self._section.measures:
            results = {"before": before.get("measured"), "after": self._judgement(model)}
            write_json(folder / JUDGED, results)
        if self._shown:
            known = before.get("texts") or [""] * len(self._shown)
            write_samples(folder, self._compared(known, self._answers(model)))

    def hooks(self) -> tuple[Hook, ...]:
        """Return hooks that count steps and survive a resume."""
        if not self._section.measures and not self._shown:
            return ()
        return (
            Hook(
                name="eval_tasks",
                before_first_step=self._begin,
                after_step=self._count,
                state_dict=lambda: {"step": self._step, "before": self._before},
                load_state_dict=self._load,
            ),
        )

    def digest(self) -> str:
        """Return a fingerprint of texts and questions."""
        arrays = [np.array(window.tokens) for window in self._windows]
        arrays += [np.array(question.prompt) for question in self._questions]
        answers = "\0".join(question.reference for question in self._questions)
        return fingerprint(*arrays, np.frombuffer(answers.encode(), np.uint8))

    def _begin(self, prepared: Prepared) -> None:
        with prepared.autocast():
            self.before(prepared.model)

    def _count(self, _prepared: Prepared, _applied: Tensor) -> None:
        self._step += 1
        self._known.clear()

    def _load(self, state: dict[str, Any]) -> None:
        self._step, self._before = int(state["step"]), str(state["before"])

    def _judgement(self, model: nn.Module) -> dict[str, Any]:
        """Return the results for a model, cached by its fingerprint."""
        if not self._section.measures:
            return {}
        key = self._fingerprint(model)
        if key not in self._known:
            self._known[key] = self._measured(model)
        return self._known[key]

    def _measured(self, model: nn.Module) -> dict[str, Any]:
        section, results = self._section, dict[str, Any]()
        if self._windows:
            text = perplexity_of_windows(model, self._windows, batch_size=section.batch_size)
            results["perplexity"] = {**text._asdict(), "perplexity": text.perplexity}
        if self._questions:
            answers = exact_match(
                model,
                self._template,
                self._questions,
                by=section.exact_match_by,
                max_new_tokens=section.max_new_tokens,
                batch_size=section.batch_size,
            )
            results["exact_match"] = answers.to_json()
        return results

    @torch.no_grad()
    def _fingerprint(self, model: nn.Module) -> str:
        """Return a hash of logits, which depend on weights, masks and adapters."""
        first = self._windows[0].tokens if self._windows else self._questions[0].prompt
        ids = torch.tensor([first[:PROBE]], device=next(model.parameters()).device)
        with in_eval_mode(model):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return hashlib.blake2b(logits.float().cpu().numpy().tobytes()).hexdigest()

    def _answers(self, model: nn.Module) -> list[str]:
        tokenizer = self._template.tokenizer
        tokens = generate_as_saved(
            model,
            [question.prompt for question in self._shown],
            max_new_tokens=self._sample_tokens,
            batch_size=self._section.batch_size,
            padding=padding_token(tokenizer),
        )
        return [str(tokenizer.decode(each, skip_special_tokens=True)).strip() for each in tokens]

    def _compared(self, before: Sequence[str], after: Sequence[str]) -> list[Sample]:
        decode = self._template.tokenizer.decode
        return [
            Sample(prompt=str(decode(q.prompt)), before=one, after=other, reference=q.reference)
            for q, one, other in zip(self._shown, before, after, strict=True)
        ]

    def _text_windows(self) -> list[Window]:
        section, room = self._section, self._room or USUAL_LENGTH
        length = section.perplexity_length or min(USUAL_LENGTH, room)
        if self._room is not None and section.texts and length > room:
            raise ConfigError(
                f"eval_tasks.perplexity_length must be at most the model's {room} tokens, got "
                f"{length}. Write eval_tasks.perplexity_length={room}."
            )
        most = section.perplexity_tokens
        matches: list[Window] = []
        for text in read_texts(section.texts, most_bytes=most * BYTES_A_TOKEN):
            tokens = encode(self._template.tokenizer, text.text)[:most]
            if len(tokens) < 2:
                raise ConfigError(
                    f"eval_tasks.perplexity: {text.path} has fewer than two tokens. Give a longer "
                    "text."
                )
            matches += make_windows(tokens, length=length)
        return matches

    def _load_questions(self) -> list[Question]:
        section = self._section
        if section.exact_match is None:
            return []
        path = expand_path(section.exact_match)
        result = questions_from(path, self._template, most=section.exact_match_rows)
        comparison_kind(
            section.exact_match_by, [(each.reference, each.location) for each in result]
        )
        most = section.max_new_tokens
        for each in result:
            if self._room is not None and len(each.prompt) + most > self._room:
                raise ConfigError(
                    f"eval_tasks.exact_match: {each.location} has a prompt of {len(each.prompt)} "
                    f"tokens; with eval_tasks.max_new_tokens={most} it exceeds the model's "
                    f"{self._room} tokens. Write a smaller max_new_tokens, or remove the row."
                )
        return result

    def _samples(self, rows: TokenRows | None) -> list[Question]:
        if rows is None or not self._section.samples:
            return []
        room = None if self._room is None else self._room - self._sample_tokens
        count, tokenizer = self._section.samples, self._template.tokenizer
        return sample_questions(rows, tokenizer, count=count, room=room)

    @property
    def _sample_tokens(self) -> int:
        """At most half of the context length."""
        most = self._section.max_new_tokens
        return most if self._room is None else min(most, max(self._room // 2, 1))
