"""The GPT against a model somebody else trained: stories260K, whose loss is known."""

import re
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from narrowcast.workloads.lm.model import GPT
from narrowcast.workloads.lm.settings import LmModel

DATA = Path(__file__).parents[3] / "../shared/data"
FOLDER = DATA / "lm_stories260K"
STORIES = DATA / "text/tinystories_head.txt"

pytestmark = pytest.mark.skipif(
    not (FOLDER.is_dir() and STORIES.is_file()),
    reason="needs the stories260K checkpoint and TinyStories in ../shared/data",
)


def trained_gpt() -> GPT:
    """Read the checkpoint in llama2.c's first layout."""
    content = (FOLDER / "stories260K.bin").read_bytes()
    width, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("7i", content[:28])
    numbers = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    kv_width = width // heads * kv_heads
    shapes = {
        "embed": (vocab, width),
        "attn_norm": (layers, width),
        "q": (layers, width, width),
        "k": (layers, kv_width, width),
        "v": (layers, kv_width, width),
        "attn.out": (layers, width, width),
        "mlp_norm": (layers, width),
        "mlp.gate": (layers, hidden, width),
        "mlp.down": (layers, width, hidden),
        "mlp.up": (layers, hidden, width),
        "norm": (width,),
    }
    read: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        read[name], numbers = numbers[:size].view(shape), numbers[size:]
    # What is left are the cosines and sines of its rotary table.
    assert numbers.numel() == length * width // heads
    read["attn.qkv"] = torch.cat([read.pop("q"), read.pop("k"), read.pop("v")], dim=1)
    state = {f"{name}.weight": read.pop(name) for name in ("embed", "norm")}
    state["head.weight"] = state["embed.weight"]
    for name, weights in read.items():
        state |= {f"blocks.{n}.{name}.weight": weights[n] for n in range(layers)}
    settings = LmModel(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        mlp="swiglu",
        mlp_width=hidden,
    )
    model = GPT(settings, vocab=vocab, length=length)
    model.load_state_dict(state)
    return model


class SentencePieces:
    """The model's tokenizer: merges the pair of the highest score until none is left."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()[4:]
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        while content:
            score, length = struct.unpack("fi", content[:8])
            self.pieces.append(content[8 : 8 + length])
            self.scores.append(score)
            content = content[8 + length :]
        self.numbers: dict[bytes, int] = {}
        for number, piece in enumerate(self.pieces):
            self.numbers.setdefault(piece, number)

    def encode(self, text: str) -> list[int]:
        # No piece spans two words, so each word is merged by itself.
        return [
            1,
            *(token for word in re.findall(" [^ ]*", f" {text}") for token in self.merge(word)),
        ]

    def merge(self, word: str) -> list[int]:
        tokens: list[int] = []
        for character in word:
            number = self.numbers.get(character.encode())
            # Bytes follow the three control tokens, for characters that are no piece.
            tokens += [byte + 3 for byte in character.encode()] if number is None else [number]
        while True:
            merged = [
                self.numbers.get(self.pieces[left] + self.pieces[right])
                for left, right in pairwise(tokens)
            ]
            possible = [place for place, token in enumerate(merged) if token is not None]
            if not possible:
                return tokens
            best = max(possible, key=lambda place: self.scores[merged[place]])
            tokens[best : best + 2] = [merged[best]]


def test_the_trained_model_scores_its_stories_as_published():
    model, tokenizer = trained_gpt(), SentencePieces(FOLDER / "tok512.bin")
    paragraphs = STORIES.read_text(encoding="utf-8").replace("\n\n", "\0").split("\n")
    nats, count = 0.0, 0
    for story in paragraphs[:20]:
        tokens = torch.tensor(tokenizer.encode(story.replace("\0", "\n\n").strip()))
        with torch.no_grad():
            logits = model(tokens[None, :-1])[0]
        nats += F.cross_entropy(logits, tokens[1:], reduction="sum").item()
        count += len(tokens) - 1
    assert count == 6449
    assert nats / count == pytest.approx(1.335, abs=0.0005)
    assert sum(parameter.numel() for parameter in model.parameters()) == 260_032
