"""What a small language model forgets as it learns one task after another, by way of fine-tuning.

Run: python benchmarks/forgetting.py DATA [--seeds N] [--steps N] [--workers N] [--json PATH]

DATA is the folder with lm_stories260K (a Llama of 260,032 parameters that writes TinyStories) and
text/tinystories_head.txt. Three tasks that even so small a model can learn, each a question about
three words of its stories with one right answer: which is an animal, which is the last word, which
the first. Of each 1,000 questions a fifth is held out, and 100 of those are asked. The order of the
tasks is turned by one from seed to seed, so that over three seeds each stands in each place.

After each task the model answers the held-out questions of all three (greedy, exact match), and at
the end its perplexity on stories it was never tuned on is measured again. Each task is also learnt
by itself, from the same beginning, for forward transfer.

- full: every weight is trained.
- lora: one adapter (rank 8, all linear layers) through all tasks.
- freeze: as full, but rows of the base's functional networks (ICA over the stories) cannot move.
- lesion, preserve: as full, but in training these networks are silent, or all other channels are;
  the model is judged without masks, as it is saved. "masked": the same, judged as it was trained.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from narrowcast.runs import describe_machine
from narrowcast.workloads.sft.data.prepare import prepare_data
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.templates import select_template
from narrowcast.workloads.sft.ica import ICA, Freeze, Masks, functional_networks
from narrowcast.workloads.sft.judge.exact_match import exact_match
from narrowcast.workloads.sft.judge.forgetting import Accuracies
from narrowcast.workloads.sft.judge.perplexity import perplexity
from narrowcast.workloads.sft.judge.prompts import questions_from

METHODS = ("full", "lora", "freeze", "lesion", "preserve")
MASKED = ("lesion", "preserve")
RATES = {"lora": 5e-3}
"""Learning rates; of the others, `RATE`."""
RATE, BATCH, COMPONENTS = 1e-3, 16, 5
ROWS = 1000
ANIMALS = ("dog", "cat", "bird", "fish", "bear", "cow", "frog", "duck", "pig", "horse", "lion")
THINGS = ("ball", "tree", "box", "car", "hat", "cup", "bed", "door", "cake", "book", "rock", "boat")
TEMPLATE = "{instruction} {response}"
STORIES, HELD_OUT = 20, 40
"""Stories that networks are found on, and those after them whose perplexity is measured."""


def stories_model(folder: Path) -> LlamaForCausalLM:
    """Read llama2.c's file; it turns neighbours, transformers turns halves."""
    raw = (folder / "stories260K.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, seq = struct.unpack("7i", raw[:28])
    values = torch.from_numpy(np.frombuffer(raw, np.float32, offset=28).copy())
    config = LlamaConfig(
        vocab_size=abs(vocab),
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=seq,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=1,
    )
    model, at = LlamaForCausalLM(config), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        at += math.prod(shape)
        return values[at - math.prod(shape) : at].view(shape)

    def halves(weight: torch.Tensor, count: int) -> torch.Tensor:
        return weight.view(layers, count, -1, 2, dim).transpose(2, 3).reshape(layers, -1, dim)

    width = dim // heads * kv_heads
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(take(abs(vocab), dim))
        att_norm = take(layers, dim)
        parts = {
            "self_attn.q_proj": halves(take(layers, dim, dim), heads),
            "self_attn.k_proj": halves(take(layers, width, dim), kv_heads),
            "self_attn.v_proj": take(layers, width, dim),
            "self_attn.o_proj": take(layers, dim, dim),
            "input_layernorm": att_norm,
            "post_attention_layernorm": take(layers, dim),
            "mlp.gate_proj": take(layers, hidden, dim),
            "mlp.down_proj": take(layers, dim, hidden),
            "mlp.up_proj": take(layers, hidden, dim),
        }
        for name, weights in parts.items():
            for block, weight in zip(model.model.layers, weights, strict=True):
                block.get_submodule(name).weight.copy_(weight)
        model.model.norm.weight.copy_(take(dim))
    return model


def stories_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Read llama2.c's file as what it is: SentencePiece's BPE, which merges by score."""
    raw, at = (folder / "tok512.bin").read_bytes(), 4
    pieces: list[tuple[str, float]] = []
    while at < len(raw):
        score, length = struct.unpack_from("fi", raw, at)
        text = raw[at + 8 : at + 8 + length].decode("utf-8", errors="replace")
        pieces.append((text.replace(" ", "\u2581"), score))
        at += 8 + length
    for number, name in enumerate(("<unk>", "<s>", "</s>")):
        pieces[number] = (name, 0.0)
    for byte in range(256):
        pieces[3 + byte] = (f"<0x{byte:02X}>", 0.0)
    vocab = {piece: number for number, (piece, _) in enumerate(pieces)}
    scored = sorted(pieces[259:], key=lambda each: -each[1])
    merges = [
        (piece[:cut], piece[cut:])
        for piece, _ in scored
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "\u2581")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    # Its stories were laid end to end with <s> between them: that is how it knows to end a text.
    signs = {"bos_token": "<s>", "eos_token": "<s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **signs)


def tasks() -> dict[str, list[dict[str, str]]]:
    """Return the questions of each task, with their answers; words are those of the stories."""
    chance = np.random.default_rng(0)

    def three() -> list[str]:
        words = [*chance.choice(ANIMALS, 1), *chance.choice(THINGS, 2, replace=False)]
        return [str(word) for word in chance.permutation(words)]

    def rows(asked: str, answer: Callable[[list[str]], str]) -> list[dict[str, str]]:
        drawn = [three() for _ in range(2 * ROWS)]
        unique = list({f"{asked}: {', '.join(words)}?": answer(words) for words in drawn}.items())
        return [{"question": question, "answer": told} for question, told in unique[:ROWS]]

    return {
        "animal": rows("Which is an animal", lambda words: next(w for w in words if w in ANIMALS)),
        "last": rows("Which is the last word", lambda words: words[-1]),
        "first": rows("Which is the first word", lambda words: words[0]),
    }


class Study:
    """The model as it was, its networks, and the tasks, in files as anybody would have them."""

    def __init__(self, data: Path, folder: Path, *, steps: int, asked: int) -> None:
        torch.set_num_threads(1)
        self.steps, self.data = steps, data
        self.tokenizer = stories_tokenizer(data / "lm_stories260K")
        self.template = select_template("basic", self.tokenizer, instruction_template=TEMPLATE)
        text = (data / "text/tinystories_head.txt").read_text(encoding="utf-8")
        stories = [part.strip() for part in text.split("<|endoftext|>")]
        if len(stories) == 1:  # one newline between stories, a blank line between paragraphs
            marked = text.replace("\n\n", "\0").split("\n")
            stories = [part.replace("\0", "\n\n").strip() for part in marked]
        stories = [story for story in stories if story]
        self.read, self.unread = stories[:STORIES], stories[STORIES : STORIES + HELD_OUT]
        self.train, self.questions = {}, {}
        chance = np.random.default_rng(0)
        for name, rows in tasks().items():
            order = chance.permutation(len(rows))
            held = order[: len(rows) // 5]
            for part, chosen in (("train", order[len(held) :]), ("test", held[:asked])):
                path = folder / f"{name}-{part}.jsonl"
                path.write_text("\n".join(json.dumps(rows[int(n)]) for n in chosen))
            settings = SftData(
                path=str(folder / f"{name}-train.jsonl"),
                template_format="basic",
                instruction_template=TEMPLATE,
                validation_split=0,
                max_seq_length=256,
            )
            self.train[name] = prepare_data(settings, self.tokenizer, seed=0).train
            self.questions[name] = questions_from(
                folder / f"{name}-test.jsonl", self.template, most=asked
            )
        self.networks = self._networks()

    def model(self) -> LlamaForCausalLM:
        return stories_model(self.data / "lm_stories260K")

    def base_nats(self, model: nn.Module) -> float:
        return perplexity(model, self.tokenizer, self.unread, length=512, batch_size=4).nats

    def known_nats(self) -> tuple[float, int]:
        """Return the figure that the data comes with: 1.335 nats on the first 20 stories."""
        found = perplexity(self.model(), self.tokenizer, self.read, length=512)
        return found.nats, found.tokens

    def accuracy(self, model: nn.Module, task: str) -> float:
        return exact_match(
            model,
            self.template,
            self.questions[task],
            by="text",
            max_new_tokens=8,
            batch_size=100,
        ).share

    def _networks(self) -> dict[int, tuple[int, ...]]:
        ids = [self.tokenizer(story)["input_ids"][:256] for story in self.read]
        batches = [{"input_ids": torch.tensor([each])} for each in ids]
        ica = ICA(components=COMPONENTS)
        return dict(functional_networks(self.model(), batches, ica=ica).channels())

    def learn(self, learner: "Learner", task: str, *, seed: int) -> None:
        """Train on one task; the schedule and the optimizer begin anew with each."""
        data, chance = self.train[task], np.random.default_rng(seed)
        trained = [p for p in learner.model.parameters() if p.requires_grad]
        rate = RATES.get(learner.method, RATE)
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps, rate / 10)
        learner.model.train()
        with learner.masked():
            for _ in range(self.steps):
                batch = data.__getitems__(chance.integers(0, len(data), BATCH).tolist())
                learner.model(**batch).loss.backward()
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                if learner.freeze is not None:
                    learner.freeze.restore()


class Learner:
    """The model on its way through tasks, trained in one way."""

    def __init__(self, study: Study, method: str, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.method, self.channels = method, study.networks
        self.model: nn.Module = study.model()
        if method == "lora":
            config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
            self.model = get_peft_model(self.model, config)
        self.freeze = Freeze(self.model, self.channels) if method == "freeze" else None

    @contextlib.contextmanager
    def masked(self) -> Iterator[None]:
        """Silence what the method silences in training."""
        if self.method not in MASKED:
            yield
            return
        with Masks(self.model) as masks:
            getattr(masks, self.method)(self.channels)
            yield


def one(study: Study, method: str, seed: int) -> list[dict[str, Any]]:
    """Learn all tasks in a row, and each by itself; return a row for each way to judge."""
    names = list(study.train)
    order = [names[(place + seed) % len(names)] for place in range(len(names))]
    ways = ("", "masked") if method in MASKED else ("",)
    matrix: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    alone: dict[str, list[float]] = {way: [] for way in ways}
    began = time.perf_counter()
    learner = Learner(study, method, seed=seed)
    before = study.base_nats(learner.model)
    for place, task in enumerate(order):
        study.learn(learner, task, seed=100 * seed + place)
        for way in ways:
            with learner.masked() if way else contextlib.nullcontext():
                matrix[way].append(tuple(study.accuracy(learner.model, each) for each in order))
    for place, task in enumerate(order):
        single = learner if place == 0 else Learner(study, method, seed=seed)
        if place:
            study.learn(single, task, seed=100 * seed + place)
        for way in ways:
            if not place:  # the first was learnt by itself
                alone[way].append(matrix[way][0][0])
                continue
            with single.masked() if way else contextlib.nullcontext():
                alone[way].append(study.accuracy(single.model, task))
    rows = []
    for way in ways:
        found = Accuracies(matrix=tuple(matrix[way]), baselines=tuple(alone[way]))
        with learner.masked() if way else contextlib.nullcontext():
            after = study.base_nats(learner.model)
        rows.append(
            {
                "method": f"{method}, {way}" if way else method,
                "seed": seed,
                "order": order,
                "matrix": found.matrix,
                "baselines": found.baselines,
                "average": found.average,
                "backward": found.backward_transfer,
                "forward": found.forward_transfer,
                "nats_before": before,
                "nats_after": after,
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
    return rows


_STUDY: list[Study] = []


def _prepare(data: Path, folder: Path, steps: int, asked: int) -> None:
    _STUDY.append(Study(data, folder, steps=steps, asked=asked))


def _work(job: tuple[str, int]) -> list[dict[str, Any]]:
    return one(_STUDY[0], *job)


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print and return the mean over seeds of each method, and how far seeds lie apart."""
    told = []
    print("| method | AA | BWT | FWT | perplexity before | after |\n|---|---|---|---|---|---|")
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        values = {
            "average": [row["average"] for row in own],
            "backward": [row["backward"] for row in own],
            "forward": [row["forward"] for row in own],
            "perplexity_before": [math.exp(row["nats_before"]) for row in own],
            "perplexity_after": [math.exp(row["nats_after"]) for row in own],
        }
        line: dict[str, Any] = {"method": method, "seeds": len(own)}
        for name, found in values.items():
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            line[name] = {"mean": round(statistics.fmean(found), 4), "stdev": round(spread, 4)}
        shown = [f"{line[n]['mean']:.3f} ± {line[n]['stdev']:.3f}" for n in list(values)[:3]]
        after = f"{line['perplexity_after']['mean']:.1f} ± {line['perplexity_after']['stdev']:.1f}"
        before = f"{line['perplexity_before']['mean']:.2f}"
        print(f"| {method} | {' | '.join(shown)} | {before} | {after} |")
        told.append(line)
    return told


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with lm_stories260K and text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of each task")
    parser.add_argument("--asked", type=int, default=100, help="held-out questions of each task")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


def main() -> None:
    options = arguments().parse_args()
    environment = describe_machine()
    with tempfile.TemporaryDirectory() as name:
        setup = (options.data, Path(name), options.steps, options.asked)
        _prepare(*setup)
        study = _STUDY[0]
        nats, tokens = study.known_nats()
        print(f"base: {nats:.4f} nats per token on the first {STORIES} stories, {tokens} tokens")
        chosen = sum(map(len, study.networks.values()))
        print(f"networks: {chosen} channels\n")
        asked = {task: len(found) for task, found in study.questions.items()}
        jobs = [(method, seed) for method in options.methods for seed in range(options.seeds)]
        rows: list[dict[str, Any]] = []
        # Forked, so that each has what was prepared here.
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
            for found in pool.map(_work, jobs):
                rows += found
                print(
                    json.dumps(found[0]["matrix"]),
                    found[0]["method"],
                    found[0]["seconds"],
                    flush=True,
                )
    figures = {
        "environment": environment,
        "steps": options.steps,
        "asked": asked,
        "channels_chosen": chosen,
        "base_nats_on_first_stories": nats,
        "summary": table(rows),
        "rows": rows,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
