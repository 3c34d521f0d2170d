"""Language models of transformers, as small as they get, one of each family."""

import copy

import pytest
import torch

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8},
    "Gemma3Text": {"head_dim": 8},
    "Phi": {"embd_pdrop": 0.0},
    "Phi3": {},
    "SmolLM3": {},
    "Olmo": {},
    "Olmo2": {},
    "Granite": {"logits_scaling": 2.0},
}
GPT2 = {
    "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def built(family, **settings):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    given = GPT2 if family == "GPT2" else SMALL | FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**given | settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # away from ones and zeros, where much is alike
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.train()


@pytest.fixture(scope="session")
def language_model():
    """A model of a family by name, with random weights that are the same each time."""
    made = {}

    def model(family, **settings):
        key = (family, *sorted(settings.items()))
        if key not in made:
            made[key] = built(family, **settings)
        return copy.deepcopy(made[key])

    return model


@pytest.fixture(scope="session")
def sentences():
    """Tokens of two samples, and labels of which some are to be ignored."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 97, (2, 9), generator=generator)
    labels = tokens.clone()
    labels[:, :3] = -100
    labels[1, -2:] = -100
    return tokens, labels
