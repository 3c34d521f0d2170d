"""Published transformers as the backbone of a network, with their own tokenizers."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.config.problems import shortened
from narrowcast.config.workload import require_modules
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.workloads.genomics.data.examples import Ragged
from narrowcast.workloads.genomics.published.checkpoint import Checkpoint
from narrowcast.workloads.genomics.published.dnabert import MosaicBert
from narrowcast.workloads.genomics.sequences.alphabets import Alphabet
from narrowcast.workloads.genomics.sequences.tokenizers import Ids

PREFIXES = {"esm": "esm.", "dnabert2": "bert."}
"""Before the names of the encoder's weights, in files of models with a head."""
IGNORED = (
    "lm_head.", "cls.", "classifier.", "contact_head.", "pooler.", "embeddings.position_ids",
    "embeddings.token_type_ids",
)  # fmt: skip
"""Weights that are of other heads, or are computed."""


@final
class Transformer(nn.Module):
    """Hidden states of a published transformer, for tokens of its own tokenizer."""

    def __init__(self, model: nn.Module, *, by_keyword: bool) -> None:
        super().__init__()
        self.model, self.by_keyword = model, by_keyword

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return hidden states, (rows, length, width)."""
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        if not self.by_keyword:
            out: Tensor = self.model(tokens, mask)
            return out
        states: Tensor = self.model(input_ids=tokens, attention_mask=mask.long())[0]
        return states

    def stages(self) -> list[nn.Module]:
        """Return the stages from input to output, which hold all parameters."""
        encoder: Any = self.model.encoder
        last = getattr(encoder, "emb_layer_norm_after", None)
        embeddings: Any = self.model.embeddings
        return [embeddings, *encoder.layer, *([last] if last is not None else [])]


@final
class PublishedTokenizer:
    """The tokenizer of a published transformer."""

    def __init__(self, checkpoint: Checkpoint, alphabet: Alphabet) -> None:
        _require_transformers(checkpoint)
        import transformers

        fast = checkpoint.family == "dnabert2"
        kind: Any = transformers.PreTrainedTokenizerFast if fast else transformers.EsmTokenizer
        try:
            self._tokenizer: Any = kind.from_pretrained(checkpoint.folder, local_files_only=True)
        except Exception as error:  # anything transformers raises for bad files
            needed = "tokenizer.json" if fast else "vocab.txt"
            raise ConfigError(
                f"model.path={checkpoint.name}: the tokenizer cannot be loaded: {_line(error)}. "
                f"Put its {needed} next to config.json."
            ) from error
        self.alphabet = alphabet
        self.pad_id = int(self._tokenizer.pad_token_id)
        self.most = _most_tokens(checkpoint, self._tokenizer)
        """Tokens that the checkpoint can read at most."""
        _check_alphabet(checkpoint, self._tokenizer.get_vocab(), alphabet)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of sequences, with special tokens, cut to `most`."""
        if not texts:
            return []
        options = {"truncation": True, "max_length": self.most} if self.most else {}
        ids = self._tokenizer(list(texts), **options)["input_ids"]
        return [np.array(each, dtype=np.int64) for each in ids]

    def count_cut(self, rows: Ragged) -> int:
        """Return how many rows are as long as possible, and were probably cut."""
        return int((np.diff(rows.ends, prepend=0) == self.most).sum())


def build_transformer(checkpoint: Checkpoint, *, device: torch.device) -> Transformer:
    """Return the network without the published weights; on the meta device only its shapes."""
    config = checkpoint.config
    try:
        with torch.device("meta" if device.type == "meta" else "cpu"):
            if checkpoint.family == "dnabert2":
                return Transformer(MosaicBert(config), by_keyword=False)
            return Transformer(_esm(checkpoint), by_keyword=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.path={checkpoint.name}: config.json describes no network: {_line(error)}. "
            "Copy it again."
        ) from error


def load_published(backbone: Transformer, checkpoint: Checkpoint) -> None:
    """Copy the published weights into the network; raise unless all of them match."""
    prefix = PREFIXES[checkpoint.family]
    weights = checkpoint.weights()
    if any(name.startswith(prefix) for name in weights):
        weights = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    weights = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta",
            "LayerNorm.bias",  # names of TensorFlow
        ): weight
        for name, weight in weights.items()
        if not name.startswith(IGNORED)
    }
    own = backbone.model.state_dict()
    missing = {n for n in own if n not in weights and not n.endswith("inv_freq")}
    unknown = {n for n in weights if n not in own and not n.endswith("inv_freq")}
    wrong = {n for n in own.keys() & weights.keys() if own[n].shape != weights[n].shape}
    for names, what in ((missing, "is missing"), (wrong, "has another shape"),
                        (unknown, "is unknown")):  # fmt: skip
        if names:
            raise CheckpointError(
                f"model.path={checkpoint.name}: the weights do not match config.json: "
                f"{min(names)} {what}. Copy the whole checkpoint again, or use another one."
            )
    backbone.model.load_state_dict(weights, strict=False)


def _esm(checkpoint: Checkpoint) -> nn.Module:
    """Return an encoder of ESM-2 or Nucleotide Transformer."""
    _require_transformers(checkpoint)
    import transformers

    known: Any = transformers.EsmConfig
    kind: Any = transformers.EsmModel
    left_out = (
        "auto_map",
        "architectures",
        "model_type",
        "transformers_version",
        "is_folding_model",
    )
    plain = {key: value for key, value in checkpoint.config.items() if key not in left_out}
    config = known(**plain)
    model = kind(config, add_pooling_layer=False)
    del model.contact_head  # of other tasks
    if checkpoint.config.get("add_bias_fnn") is False:  # Nucleotide Transformer v2
        for layer in model.encoder.layer:
            layer.intermediate = _GatedInput(config.hidden_size, config.intermediate_size)
            layer.output.dense = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
    module: nn.Module = model
    return module


class _GatedInput(nn.Module):
    """First part of a SwiGLU MLP, in place of a linear layer and its GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 2 * inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense(x).chunk(2, -1)
        out: Tensor = F.silu(gate) * up
        return out


def add_lora(
    backbone: nn.Module, *, rank: int, alpha: float, dropout: float, targets: Sequence[str]
) -> int:
    """Freeze a backbone and add LoRA adapters to its linear layers; return how many."""
    require_modules(["peft"], of="model.tune=lora", install="narrowcast[sft]")
    import peft

    linear = {n: m for n, m in backbone.named_modules() if isinstance(m, nn.Linear)}
    names = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets:
        if target not in names:
            raise ConfigError(
                f"lora.lora_target_modules must name linear layers, got {target}. The linear "
                f"layers are {', '.join(names) or 'none'}."
            )
    if not names:
        raise UnsupportedError(
            "model.tune=lora needs linear layers, but this network has none below its head. Write "
            "model.tune=full."
        )
    config: Any = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # it divides
        lora_dropout=dropout,
        target_modules=list(targets or names),
    )
    peft.inject_adapter_in_model(config, backbone)
    return sum(name.rpartition(".")[2] in (targets or names) for name in linear)


def merged_lora(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return weights with the adapters of `add_lora` added to the layers that they are on."""
    base, first, second = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
    merged = dict[str, Tensor]()
    for name, weight in weights.items():
        if name.endswith((first, second)):
            continue
        layer = name.removesuffix(f"{base}weight")
        if layer != name:
            update = weights[layer + second].double() @ weights[layer + first].double()
            weight = (weight.double() + scale * update).to(weight.dtype)
        merged[name.replace(base, ".")] = weight
    return merged


def _require_transformers(checkpoint: Checkpoint) -> None:
    require_modules(["transformers"], of=f"model.path={checkpoint.name}", install="narrowcast[sft]")


def _most_tokens(checkpoint: Checkpoint, tokenizer: Any) -> int:
    """Return how many tokens a checkpoint can read; 0 for any number."""
    limits = [int(tokenizer.model_max_length)]
    if checkpoint.family == "esm" and (
        checkpoint.config.get("position_embedding_type", "absolute") == "absolute"
    ):
        # The first positions are of padding.
        padding = int(tokenizer.pad_token_id)
        limits.append(int(checkpoint.config["max_position_embeddings"]) - padding - 1)
    return min(limits) if min(limits) < 2**31 else 0


def _check_alphabet(
    checkpoint: Checkpoint, vocabulary: Mapping[str, int], alphabet: Alphabet
) -> None:
    """Check that a checkpoint knows the letters of the data, and not those of proteins too."""
    missing = [letter for letter in alphabet.letters if letter not in vocabulary]
    proteins = "E" in vocabulary and "F" in vocabulary
    if any(letter not in vocabulary for letter in "ACGT"):
        raise UnsupportedError(
            f"model.path={checkpoint.name} has a tokenizer without single letters, as of structure "
            "or codons. Use a checkpoint that reads plain sequences."
        )
    if missing or (proteins and alphabet.name != "protein"):
        known = "protein" if proteins else "dna"
        raise ConfigError(
            f"data.alphabet must be {known} for model.path={checkpoint.name}, whose tokenizer has "
            f"the letters of {'proteins' if proteins else 'DNA'}, got {alphabet.name}. Write "
            f"data.alphabet={known}, or use another checkpoint."
        )


def _line(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()) or type(error).__name__, 300)
