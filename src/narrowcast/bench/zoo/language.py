"""Language models of transformers and this library's own, at the shapes people know them by.

Dropout is off wherever a model has some: losses of two ways could not be compared otherwise.
"""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.bench.model import set_up
from narrowcast.bench.zoo.built import Built, drawing, own_loss
from narrowcast.bench.zoo.networks import LstmLanguageModel
from narrowcast.workloads import load_recipe
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.heads import NextTokenHead
from narrowcast.workloads.genomics.models.model import GenomicModel

LLAMA_348M = {
    "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 2816,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 1024,
}  # fmt: skip
LLAMA_1_3B = {
    "hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 5504,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
    "max_position_embeddings": 2048,
}  # fmt: skip
QWEN2_HALF_B = {
    "hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip
"""Of Qwen2.5-0.5B."""
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 64,
}  # fmt: skip
TINY_BATCH = (2, 32)


def tokens_of(vocab: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return random tokens, the same for every way."""
    generator = drawing(device)
    return torch.randint(vocab, shape, generator=generator, device=device)


def llama(device: torch.device, *, quick: bool, large: bool = False) -> Built:
    """Return a Llama as transformers builds it."""
    library: Any = importlib.import_module("transformers")
    shape, batch = (LLAMA_1_3B, (8, 2048)) if large else (LLAMA_348M, (16, 1024))
    return _causal(
        library.LlamaForCausalLM,
        library.LlamaConfig,
        shape,
        batch=batch,
        device=device,
        quick=quick,
    )


def qwen(device: torch.device, *, quick: bool) -> Built:
    """Return a Qwen2 as transformers builds it."""
    library: Any = importlib.import_module("transformers")
    shape = QWEN2_HALF_B
    return _causal(
        library.Qwen2ForCausalLM,
        library.Qwen2Config,
        shape,
        batch=(8, 1024),
        device=device,
        quick=quick,
    )


def gpt2(device: torch.device, *, quick: bool) -> Built:
    """Return GPT-2 as transformers builds it."""
    library: Any = importlib.import_module("transformers")
    tiny = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = library.GPT2Config(**(tiny | _ENDS if quick else {}), **off)
    with device:
        model = library.GPT2LMHeadModel(config)
    ids = tokens_of(config.vocab_size, TINY_BATCH if quick else (16, 1024), device)
    return _with_labels(model, ids, ids)


def bert(device: torch.device, *, quick: bool) -> Built:
    """Return BERT as transformers builds it, which fills gaps."""
    library: Any = importlib.import_module("transformers")
    tiny = {name: TINY[name] for name in TINY if name != "num_key_value_heads"}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = library.BertConfig(**(tiny if quick else {}), **off)
    with device:
        model = library.BertForMaskedLM(config)
    ids = tokens_of(config.vocab_size, TINY_BATCH if quick else (32, 512), device)
    generator = drawing(device, seed=2)
    # 15 % of the tokens are asked for, as in the paper.
    asked = torch.rand(ids.shape, generator=generator, device=device) < 0.15
    return _with_labels(model, ids, torch.where(asked, ids, -100))


def gpt(device: torch.device, *, quick: bool) -> Built:
    """Return the GPT of the recipe lm/gpt-350m, with the loss of its logits."""
    words = ("model.layers=2", "model.width=64", "model.heads=4", "model.vocab=256",
             "data.length=32", "batch_size=2")  # fmt: skip
    recipe = load_recipe("lm/gpt-350m", (f"device={device.type}", *(words if quick else ()))).recipe
    bench = set_up(recipe)
    return Built(model=bench.model.train(), loss_of=_of_logits, inputs=tuple(bench.batches[0]))


def lstm(device: torch.device, *, quick: bool) -> Built:
    """Return an LSTM of two layers over tokens."""
    vocab, width, shape = (256, 32, TINY_BATCH) if quick else (32000, 1024, (64, 256))
    with device:
        model = LstmLanguageModel(vocab, width, layers=2)
    ids = tokens_of(vocab, (shape[0], shape[1] + 1), device)
    return Built(
        model=model.train(),
        loss_of=_of_logits,
        inputs=(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
    )


def hyena(device: torch.device, *, quick: bool) -> Built:
    """Return a model of DNA with Hyena's blocks, which predicts the next letter."""
    shape: dict[str, Any] = {"width": 32, "layers": 1} if quick else {"width": 768, "layers": 12}
    length = 64 if quick else 8192
    config = GenomicConfig(vocab_size=16, max_length=length, causal=True, **shape)
    torch.manual_seed(0)
    model = nn.Sequential(GenomicModel(config), NextTokenHead(config.width, 16)).to(device)
    ids = tokens_of(16, (2, length + 1), device)
    return Built(
        model=model.train(),
        loss_of=_of_logits,
        inputs=(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()),
    )


_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _causal(
    model: Any,
    config: Any,
    shape: dict[str, Any],
    *,
    batch: tuple[int, int],
    device: torch.device,
    quick: bool,
) -> Built:
    chosen = config(**(TINY if quick else shape), **_ENDS, use_cache=False)
    with device:
        made = model(chosen)
    ids = tokens_of(chosen.vocab_size, TINY_BATCH if quick else batch, device)
    return _with_labels(made, ids, ids)


def _with_labels(model: nn.Module, ids: Tensor, labels: Tensor) -> Built:
    names = ("input_ids", "labels")
    return Built(model=model.train(), loss_of=own_loss(*names), inputs=(ids, labels))


def _of_logits(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy as everybody writes it: of all logits, in fp32."""
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
