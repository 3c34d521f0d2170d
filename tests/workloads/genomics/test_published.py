"""Published checkpoints: loaded exactly, fine-tuned, and used for predictions."""

import csv
import itertools
import json
import math
import random

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import narrowcast as nc
from narrowcast.cli.entry import narrowcast as command
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.runs import EvalRecord
from narrowcast.workloads.genomics.models.model import GenomicModel
from narrowcast.workloads.genomics.published.checkpoint import find_checkpoint
from narrowcast.workloads.genomics.published.hyenadna import hyenadna_config, hyenadna_weights
from narrowcast.workloads.genomics.published.transformer import (
    PublishedTokenizer,
    build_transformer,
    load_published,
    merged_lora,
)
from narrowcast.workloads.genomics.sequences.alphabets import ALPHABETS
from narrowcast.workloads.genomics.sequences.tokenizers import make_tokenizer

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
SMALL = (
    "epochs=null", "steps=6", "batch_size=16", "eval.every=0", "health.every=0", "device=cpu",
    "precision.task=null", "precision.policy=fp32", "model.dropout=0",
)  # fmt: skip
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 40,
}  # fmt: skip
SIX = ["".join(each) for each in itertools.product("ATCG", repeat=6)]
NT_TOKENS = ["<unk>", "<pad>", "<mask>", "<cls>", *SIX, *"ATCGN"]
"""The vocabulary of Nucleotide Transformer."""
ESM_TOKENS = [
    "<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO", ".", "-", "<null_1>",
    "<mask>",
]  # fmt: skip
"""The vocabulary of ESM-2."""


def save_esm(folder, tokens, *, eos, masked=True, **settings):
    """Save a small model of transformers with its tokenizer, as published."""
    folder.mkdir(exist_ok=True)
    (folder / "words.txt").write_text("\n".join(tokens))
    tokenizer = transformers.EsmTokenizer(
        folder / "words.txt", **({} if eos else {"eos_token": None})
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.EsmConfig(
        vocab_size=len(tokens), pad_token_id=tokens.index("<pad>"),
        mask_token_id=tokens.index("<mask>"), **SHAPE, **settings,
    )  # fmt: skip
    kind = transformers.EsmForMaskedLM if masked else transformers.EsmModel
    kind(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def esm2(tmp_path_factory):
    return save_esm(
        tmp_path_factory.mktemp("checkpoints") / "esm2", ESM_TOKENS, eos=True,
        position_embedding_type="rotary", token_dropout=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def nt(tmp_path_factory):
    return save_esm(
        tmp_path_factory.mktemp("checkpoints") / "nt", NT_TOKENS, eos=False,
        position_embedding_type="absolute", emb_layer_norm_before=False,
    )  # fmt: skip


def loaded(folder, alphabet):
    checkpoint = find_checkpoint(str(folder))
    backbone = build_transformer(checkpoint, device=CPU)
    load_published(backbone, checkpoint)
    return backbone.eval(), PublishedTokenizer(checkpoint, ALPHABETS[alphabet])


def padded(rows, pad):
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    return tokens, tokens != pad


def protein_rows(path, count=200):
    rng = random.Random(0)
    rows = [("".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=12)),) for _ in range(count)]
    rows = [(text, sum(letter in "AVILMFWY" for letter in text)) for (text,) in rows]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("sequence", "label"), *rows])
    return rows


def dna_rows(path, count=200, *, symmetric=False):
    rng, rows = random.Random(0), []
    table = str.maketrans("ACGT", "TGCA")
    for number in range(count):
        text = "".join(rng.choices("ACGT", k=30 + rng.randrange(6)))
        if number % 2:
            site = "GATTACA" if rng.random() < 0.5 or not symmetric else "TGTAATC"
            text = text[:11] + site + text[18:]
        rows.append((text, ("no", "yes")[number % 2]))
    assert "GATTACA"[::-1].translate(table) == "TGTAATC"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("sequence", "label"), *rows])
    return rows


def train(folder, *settings):
    records = list(nc.train("genomics/classify", [*SMALL, *settings], out=folder))
    return [each.metrics for each in records if isinstance(each, EvalRecord)][-1]


def predictions(run, file, *options):
    done = CliRunner().invoke(
        command, ["genomics", "predict", str(run), str(file), "--device", "cpu", *options]
    )
    assert done.exit_code == 0, done.output
    return list(csv.DictReader(done.stdout.splitlines())), done.stderr


@pytest.mark.parametrize("name", ["esm2", "nt"])
def test_hidden_states_are_those_of_transformers(name, request):
    folder = request.getfixturevalue(name)
    backbone, tokenizer = loaded(folder, "protein" if name == "esm2" else "dna")
    texts = ["MKTAYIAKQR", "GGVL"] if name == "esm2" else ["ACGTACGTACGTACG", "ACGNTTTTTTA"]
    rows = tokenizer.encode(texts)
    real = transformers.EsmTokenizer.from_pretrained(folder)
    assert [row.tolist() for row in rows] == real(texts)["input_ids"]
    tokens, mask = padded(rows, tokenizer.pad_id)
    model = transformers.EsmModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        torch.testing.assert_close(backbone(tokens, mask)[mask], expected[mask])


def test_long_sequences_are_cut_to_the_positions_of_the_checkpoint(nt):
    _, tokenizer = loaded(nt, "dna")
    (row,) = tokenizer.encode(["ACGTAC" * 60])
    assert len(row) == 40 - 1 - 1  # positions start after that of padding


@pytest.mark.parametrize("tune", ["full", "lora"])
def test_protein_values_are_fine_tuned_and_predicted(esm2, tmp_path, tune):
    protein_rows(tmp_path / "rows.csv")
    judged = train(
        tmp_path / "run", f"data.path={tmp_path}/rows.csv", "data.alphabet=protein",
        "objective.target=value", f"model.path={esm2}", f"model.tune={tune}", "lora.lora_r=4",
        "objective.baseline=compared",
    )  # fmt: skip
    weights = load_file(tmp_path / "run/model.safetensors")
    published = load_file(esm2 / "model.safetensors")
    name = "encoder.layer.0.attention.self.query{}.weight"
    if tune == "lora":
        stored = weights[f"backbone.model.{name.format('.base_layer')}"]
        assert torch.equal(stored, published[f"esm.{name.format('')}"])
        assert weights[f"backbone.model.{name.format('.lora_B.default')}"].any()
    else:
        stored = weights[f"backbone.model.{name.format('')}"]
        assert not torch.equal(stored, published[f"esm.{name.format('')}"])
    held_out = json.loads((tmp_path / "run/judged.json").read_text())["validation"]
    assert held_out["measured"]["rmse"] == pytest.approx(judged["rmse"], rel=1e-4)
    (tmp_path / "new.csv").write_text("sequence\nMKTAYIAKQRAA\nGGVLGG\n")
    rows, _ = predictions(tmp_path / "run", tmp_path / "new.csv")
    assert np.isfinite([float(row["value"]) for row in rows]).all()


def test_predictions_do_not_need_the_checkpoint(nt, tmp_path):
    rows = dna_rows(tmp_path / "rows.csv", symmetric=True)
    copied = tmp_path / "moved"
    copied.mkdir()
    for file in nt.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    judged = train(
        tmp_path / "run", f"data.path={tmp_path}/rows.csv", "data.reverse_complement=true",
        f"model.path={copied}", "optimizer.lr=2e-2", "steps=20",
    )  # fmt: skip
    for file in copied.iterdir():
        file.unlink()
    result, _ = predictions(tmp_path / "run", tmp_path / "rows.csv")
    right = np.mean([row["class"] == label for row, (_, label) in zip(result, rows, strict=True)])
    assert right > 0.7
    assert judged["mcc"] > 0
    table = str.maketrans("ACGT", "TGCA")
    lines = [text[::-1].translate(table) for text, _ in rows]
    (tmp_path / "turned.csv").write_text("\n".join(["sequence", *lines]))
    other, _ = predictions(tmp_path / "run", tmp_path / "turned.csv")
    for one, two in zip(result, other, strict=True):
        assert float(one["chance_yes"]) == pytest.approx(float(two["chance_yes"]), abs=1e-5)


def swiglu(x, weights, layer):
    """The MLP of Nucleotide Transformer v2, by its definition."""
    first = weights[f"esm.encoder.layer.{layer}.intermediate.dense.weight"]
    last = weights[f"esm.encoder.layer.{layer}.output.dense.weight"]
    gate, up = (x @ first.T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ last.T


def test_gated_layers_of_nucleotide_transformer_v2_are_loaded(esm2, tmp_path):
    weights = load_file(esm2 / "model.safetensors")
    for layer in range(2):
        place = f"esm.encoder.layer.{layer}"
        weights[f"{place}.intermediate.dense.weight"] = torch.randn(96, 32) / 6
        del weights[f"{place}.intermediate.dense.bias"], weights[f"{place}.output.dense.bias"]
    folder = tmp_path / "nt2"
    folder.mkdir()
    for name in ("tokenizer_config.json", "vocab.txt"):
        (folder / name).write_bytes((esm2 / name).read_bytes())
    config = json.loads((esm2 / "config.json").read_text())
    del config["model_type"]  # as published
    config |= {"add_bias_fnn": False, "auto_map": {"AutoConfig": "esm_config.EsmConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    backbone, _ = loaded(folder, "protein")
    layer, x = backbone.model.encoder.layer[1], torch.randn(2, 5, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            layer.output(layer.intermediate(x), x), x + swiglu(x, weights, 1)
        )


def save_dnabert(folder):
    """Save a small checkpoint in the layout of DNABERT-2; return its weights."""
    from tokenizers import Tokenizer, models, processors

    specials = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    words = [*specials, *"ACGT", "AC", "GT", "ACGT"]
    merges = [("A", "C"), ("G", "T"), ("AC", "GT")]
    vocabulary = {word: at for at, word in enumerate(words)}
    bpe = Tokenizer(models.BPE(vocabulary, merges, unk_token="[UNK]"))
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    config = {
        "model_type": "bert", "alibi_starting_size": 16, "vocab_size": len(words),
        "type_vocab_size": 2, "architectures": ["BertForMaskedLM"], **SHAPE,
        "num_attention_heads": 12, "hidden_size": 24, "layer_norm_eps": 1e-12,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    width, inner = 24, SHAPE["intermediate_size"]
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator) / 4

    weights = {
        "bert.embeddings.word_embeddings.weight": drawn(len(words), width),
        "bert.embeddings.token_type_embeddings.weight": drawn(2, width),
        "cls.predictions.bias": drawn(len(words)),
        "bert.pooler.dense.weight": drawn(width, width),
    }
    norms = ["bert.embeddings.LayerNorm"]
    for layer in range(2):
        place = f"bert.encoder.layer.{layer}"
        norms += [f"{place}.attention.output.LayerNorm", f"{place}.mlp.layernorm"]
        weights |= {
            f"{place}.attention.self.Wqkv.weight": drawn(3 * width, width),
            f"{place}.attention.self.Wqkv.bias": drawn(3 * width),
            f"{place}.attention.output.dense.weight": drawn(width, width),
            f"{place}.attention.output.dense.bias": drawn(width),
            f"{place}.mlp.gated_layers.weight": drawn(2 * inner, width),
            f"{place}.mlp.wo.weight": drawn(width, inner),
            f"{place}.mlp.wo.bias": drawn(width),
        }
    for norm in norms:
        weights |= {f"{norm}.weight": 1 + drawn(width), f"{norm}.bias": drawn(width)}
    save_file(weights, folder / "model.safetensors")
    return weights


SLOPES = (
    0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625,
    0.7071067811865476, 0.35355339059327384, 0.17677669529663692, 0.08838834764831849,
)  # fmt: skip
"""Slopes of ALiBi for 12 heads, of the authors' program."""


def by_definition(weights, tokens):
    """DNABERT-2 of one row in fp64, head by head."""
    one = {name.removeprefix("bert."): weight.double() for name, weight in weights.items()}

    def norm(x, name):
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], one[f"{name}.weight"], one[f"{name}.bias"], 1e-12
        )

    x = one["embeddings.word_embeddings.weight"][tokens]
    x = norm(x + one["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    distance = torch.tensor([[abs(i - j) for j in range(len(tokens))] for i in range(len(tokens))])
    for layer in range(2):
        place = f"encoder.layer.{layer}"
        wide = x @ one[f"{place}.attention.self.Wqkv.weight"].T
        q, k, v = (wide + one[f"{place}.attention.self.Wqkv.bias"]).split(24, -1)
        heads = []
        for head, slope in enumerate(SLOPES):
            part = slice(2 * head, 2 * head + 2)
            scores = q[:, part] @ k[:, part].T / 2**0.5 - slope * distance
            heads.append(scores.softmax(-1) @ v[:, part])
        mixed = torch.cat(heads, -1) @ one[f"{place}.attention.output.dense.weight"].T
        mixed = mixed + one[f"{place}.attention.output.dense.bias"]
        x = norm(x + mixed, f"{place}.attention.output.LayerNorm")
        gate, up = (x @ one[f"{place}.mlp.gated_layers.weight"].T).chunk(2, -1)
        inner = torch.nn.functional.gelu(gate) * up
        inner = inner @ one[f"{place}.mlp.wo.weight"].T + one[f"{place}.mlp.wo.bias"]
        x = norm(x + inner, f"{place}.mlp.layernorm")
    return x


def test_dnabert2_is_computed_as_defined(tmp_path):
    weights = save_dnabert(tmp_path)
    backbone, tokenizer = loaded(tmp_path, "dna")
    rows = tokenizer.encode(["ACGTACGTTTAC", "GGT"])
    assert rows[1].tolist() == [1, 7, 10, 2]
    tokens, mask = padded(rows, tokenizer.pad_id)
    with torch.no_grad():
        states = backbone(tokens, mask)
    for row, result in zip(rows, states, strict=True):
        expected = by_definition(weights, torch.from_numpy(row)).float()
        torch.testing.assert_close(result[: len(row)], expected, rtol=1e-4, atol=1e-5)


def test_dnabert2_is_fine_tuned_with_adapters(tmp_path):
    (tmp_path / "base").mkdir()
    save_dnabert(tmp_path / "base")
    rows = dna_rows(tmp_path / "rows.csv")
    train(
        tmp_path / "run", f"data.path={tmp_path}/rows.csv", f"model.path={tmp_path}/base",
        "model.tune=lora", "objective.baseline=none",
    )  # fmt: skip
    result, _ = predictions(tmp_path / "run", tmp_path / "rows.csv")
    assert len(result) == len(rows)
    again = train(
        tmp_path / "again", f"data.path={tmp_path}/rows.csv", f"model.path={tmp_path}/run",
        "objective.baseline=none",
    )  # fmt: skip
    assert np.isfinite(again["mcc"])


def test_merged_adapters_are_those_of_peft():
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4))
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules=["0", "2"], init_lora_weights=False)
    adapted = peft.inject_adapter_in_model(config, model)
    merged = merged_lora(adapted.state_dict(), 8 / 3)
    for name in ("0", "2"):
        layer = adapted.get_submodule(name)
        layer.merge()
        torch.testing.assert_close(merged[f"{name}.weight"], layer.base_layer.weight)
        assert torch.equal(merged[f"{name}.bias"], layer.base_layer.bias)


def changed(folder, copy, **config):
    """Copy a checkpoint with other entries in its config."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    old = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(old | config))
    return copy


def test_pickled_weights_are_not_read(nt, tmp_path):
    copy = changed(nt, tmp_path / "copy")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"save_file.*model\.safetensors"):
        find_checkpoint(str(copy)).weights()


def test_weights_that_do_not_match_are_refused(nt, tmp_path):
    for at, (change, match) in enumerate(
        [
            ({"intermediate_size": 50}, "dense.bias has another shape"),
            ({"num_hidden_layers": 3}, r"layer\.2.*is missing"),
            ({"num_hidden_layers": 1}, r"layer\.1.*is unknown"),
        ]
    ):
        copy = changed(nt, tmp_path / str(at), **change)
        with pytest.raises(CheckpointError, match=match):
            loaded(copy, "dna")


def test_checkpoints_that_need_remote_code_are_refused(nt, tmp_path):
    copy = changed(nt, tmp_path / "copy", model_type="caduceus")
    with pytest.raises(UnsupportedError, match="mamba"):
        find_checkpoint(str(copy))
    copy = changed(nt, tmp_path / "other", model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(UnsupportedError, match="model_type=llama"):
        find_checkpoint(str(copy))


def test_tokenizers_without_letters_are_refused(esm2, tmp_path):
    copy = changed(esm2, tmp_path / "copy")
    words = [f"{word}p" if word.isalpha() else word for word in ESM_TOKENS]
    (copy / "vocab.txt").write_text("\n".join(words))
    with pytest.raises(UnsupportedError, match="without single letters"):
        loaded(copy, "protein")


def test_settings_that_a_checkpoint_cannot_obey_are_refused(esm2, nt, tmp_path):
    dna_rows(tmp_path / "rows.csv", count=40)
    rows = f"data.path={tmp_path}/rows.csv"
    for settings, match in (
        ([f"model.path={esm2}"], "data.alphabet must be protein"),
        ([f"model.path={nt}", "data.alphabet=rna"], "data.alphabet must be dna"),
        ([f"model.path={nt}", "data.mutate=0.1"], "data.mutate"),
        (["model.tune=lora"], "tune=lora needs a trained network"),
        ([f"model.path={nt}", "model.tune=lora", "tuning.freeze=true"], "freeze"),
        ([f"model.path={nt}", "model.tune=lora", "lora.lora_target_modules=[up]"], "got up"),
        ([f"model.path={nt}", "objective.task=variant_effect", "objective.baseline=none"],
         "only classify"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            train(tmp_path / "run", rows, *settings)


def save_hyenadna(folder, length=48, width=8):
    """Save a small checkpoint in the layout of HyenaDNA; return its weights."""
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": "hyenadna", "d_model": width, "d_inner": 4 * width, "n_layer": 2,
        "max_seq_len": length, "vocab_size": 12, "emb_dim": 5, "filter_order": 6,
        "hyena_order": 2, "num_inner_mlps": 2, "short_filter_order": 3,
        "architectures": ["HyenaDNAForCausalLM"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    time = torch.linspace(0, 1, length)
    turns = 2 * math.pi * torch.arange(length) / length
    waves = [turns * 1e-4, turns]
    z = torch.stack([time, *map(torch.cos, waves), *(torch.sin(-each) for each in waves)], 1)
    deltas = torch.linspace(math.log(1e-2) / 1.5, math.log(1e-2) / 0.3, width)
    top = "hyena.backbone"
    weights = {f"{top}.embeddings.word_embeddings.weight": drawn(16, width)}
    norms = [f"{top}.ln_f"]
    for layer in range(2):
        place = f"{top}.layers.{layer}"
        norms += [f"{place}.norm1", f"{place}.norm2"]
        implicit = f"{place}.mixer.filter_fn"
        weights |= {
            f"{place}.mixer.in_proj.weight": drawn(3 * width, width),
            f"{place}.mixer.in_proj.bias": drawn(3 * width),
            f"{place}.mixer.out_proj.weight": drawn(width, width),
            f"{place}.mixer.out_proj.bias": drawn(width),
            f"{place}.mixer.short_filter.weight": drawn(3 * width, 1, 3),
            f"{place}.mixer.short_filter.bias": drawn(3 * width),
            f"{place}.mlp.fc1.weight": drawn(4 * width, width),
            f"{place}.mlp.fc1.bias": drawn(4 * width),
            f"{place}.mlp.fc2.weight": drawn(width, 4 * width),
            f"{place}.mlp.fc2.bias": drawn(width),
            f"{implicit}.bias": drawn(width),
            f"{implicit}.pos_emb.z": z[None].clone(),
            f"{implicit}.pos_emb.t": time[None, :, None].clone(),
            f"{implicit}.modulation.deltas": deltas[None, None].clone(),
            f"{implicit}.implicit_filter.0.weight": drawn(6, 5),
            f"{implicit}.implicit_filter.{1 + 2 * layer}.freq": 10 + drawn(1, 6),
            f"{implicit}.implicit_filter.2.weight": drawn(6, 6),
            f"{implicit}.implicit_filter.4.weight": drawn(6, 6),
            f"{implicit}.implicit_filter.6.weight": drawn(width, 6),
        }
        weights |= {f"{implicit}.implicit_filter.{at}.bias": drawn(6) for at in (0, 2, 4)}
    for norm in norms:
        weights |= {f"{norm}.weight": 1 + drawn(width), f"{norm}.bias": drawn(width)}
    save_file(weights, folder / "model.safetensors")
    return weights


def hyenadna_by_definition(weights, ids):
    """HyenaDNA of one row in fp64, with its convolutions as sums."""
    one = {n.removeprefix("hyena.backbone."): weight.double() for n, weight in weights.items()}

    def linear(x, name):
        return x @ one[f"{name}.weight"].T + one.get(f"{name}.bias", 0)

    def norm(x, name):
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], one[f"{name}.weight"], one[f"{name}.bias"]
        )

    x = one["embeddings.word_embeddings.weight"][ids]
    length = len(ids)
    for layer in range(2):
        place = f"layers.{layer}.mixer"
        implicit = f"{place}.filter_fn"
        h = one[f"{implicit}.pos_emb.z"][0, :length]
        for at in (0, 2, 4):
            h = linear(h, f"{implicit}.implicit_filter.{at}")
            h = torch.sin(one[f"{implicit}.implicit_filter.{1 + 2 * layer}.freq"] * h)
        h = linear(h, f"{implicit}.implicit_filter.6")
        rates = one[f"{implicit}.modulation.deltas"][0].abs()
        h = h * (torch.exp(-one[f"{implicit}.pos_emb.t"][0, :length] * rates) + 0.05)
        wide = linear(norm(x, f"layers.{layer}.norm1"), f"{place}.in_proj")
        taps = one[f"{place}.short_filter.weight"][:, 0]
        before = torch.cat([wide.new_zeros(2, wide.shape[1]), wide])
        short = sum(before[at : at + length] * taps[:, at] for at in range(3))
        last, gate, value = (short + one[f"{place}.short_filter.bias"]).chunk(3, -1)
        z = gate * value
        mixed = [(h[: at + 1].flip(0) * z[: at + 1]).sum(0) for at in range(length)]
        x = x + linear(
            (torch.stack(mixed) + z * one[f"{implicit}.bias"]) * last, f"{place}.out_proj"
        )
        inner = linear(norm(x, f"layers.{layer}.norm2"), f"layers.{layer}.mlp.fc1")
        inner = torch.nn.functional.gelu(inner, approximate="tanh")
        x = x + linear(inner, f"layers.{layer}.mlp.fc2")
    return norm(x, "ln_f")


def test_hyenadna_is_computed_as_defined(tmp_path):
    weights = save_hyenadna(tmp_path)
    tokenizer = make_tokenizer("byte", ALPHABETS["dna"], 1, 0)
    checkpoint = find_checkpoint(str(tmp_path))
    config = hyenadna_config(checkpoint, tokenizer)
    model = GenomicModel(config).eval()
    renamed = hyenadna_weights(checkpoint, config, tokenizer)
    model.load_state_dict({name.removeprefix("backbone."): w for name, w in renamed.items()})
    text = "ACGTNTTGACATACCGGTA"
    ids = ["ACGTN".index(letter) + 7 for letter in text]
    tokens = torch.from_numpy(tokenizer.encode(text))[None]
    with torch.no_grad():
        result = model(tokens, torch.ones_like(tokens, dtype=torch.bool))[0]
    expected = hyenadna_by_definition(weights, ids).float()
    # Sines of fp32 angles up to about 100.
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-4)


def test_hyenadna_is_fine_tuned(tmp_path):
    save_hyenadna(tmp_path / "base")
    rows = dna_rows(tmp_path / "rows.csv", count=100)
    base = [
        f"data.path={tmp_path}/rows.csv", f"model.path={tmp_path}/base", "objective.baseline=none"
    ]  # fmt: skip
    train(tmp_path / "run", *base)
    result, _ = predictions(tmp_path / "run", tmp_path / "rows.csv")
    assert len(result) == len(rows)
    save_hyenadna(tmp_path / "base", length=20)
    with pytest.raises(ConfigError, match="at most 20 letters"):
        train(tmp_path / "other", *base)


def test_hyenadna_with_trained_positions_is_refused(tmp_path):
    weights = save_hyenadna(tmp_path)
    weights["hyena.backbone.layers.1.mixer.filter_fn.pos_emb.z"] += 0.1
    save_file(weights, tmp_path / "model.safetensors")
    checkpoint, tokenizer = (
        find_checkpoint(str(tmp_path)),
        make_tokenizer("byte", ALPHABETS["dna"], 1, 0),
    )
    with pytest.raises(UnsupportedError, match=r"pos_emb\.z was trained"):
        hyenadna_weights(checkpoint, hyenadna_config(checkpoint, tokenizer), tokenizer)
