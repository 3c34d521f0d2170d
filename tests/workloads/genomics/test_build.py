"""Networks that go on from finished runs, and data from which nothing can be learnt."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.workloads import load_recipe
from narrowcast.workloads.genomics.build import build_parts

CPU = torch.device("cpu")
SMALL = (
    "epochs=null", "steps=2", "batch_size=8", "model.width=16", "model.layers=1",
    "model.dropout=0", "data.max_length=64", "eval.every=0", "eval.patience=0",
    "eval.keep_best=false", "health.every=0", "device=cpu", "precision.task=null",
    "precision.policy=fp32",
)  # fmt: skip


def parts_of(recipe, *words, device=CPU):
    loaded = load_recipe(f"genomics/{recipe}", [*SMALL, *words]).recipe
    return build_parts(loaded, device=device)


@pytest.fixture
def table(tmp_path):
    def write(labels, name="t.csv"):
        rng = np.random.default_rng(len(labels))
        lines = [f"{''.join(rng.choice(list('ACGT'), 20))},{label}" for label in labels]
        (tmp_path / name).write_text("\n".join(["sequence,label", *lines]))
        return f"data.path={tmp_path / name}"

    return write


def test_a_base_that_wrote_genomes_gets_a_new_head(finished, table, tmp_path):
    base = finished("base")
    words = [*SMALL, table(["a", "b"] * 20), f"model.path={base}"]
    parts = parts_of("variant_effect", *words)
    before = load_file(base / "model.safetensors")
    now = parts.network.state_dict()
    assert all(torch.equal(now[key], before[key]) for key in now if key.startswith("backbone."))
    assert now["head.out.weight"].shape == (2, 16)
    assert f"weights loaded from {base}, with a new head" in parts.notes
    assert parts.info.config.causal
    list(nc.train("genomics/variant_effect", words, out=tmp_path / "run"))
    after = load_file(tmp_path / "run" / "model.safetensors")
    assert any(not torch.equal(after[key], before[key]) for key in after if key in before)


def test_a_classifier_goes_on_with_its_own_head(finished, table, tmp_path):
    words = [table(["a", "b"] * 20)]
    list(nc.train("genomics/variant_effect", [*SMALL, *words], out=tmp_path / "first"))
    before = load_file(tmp_path / "first" / "model.safetensors")
    path = f"model.path={tmp_path / 'first'}"
    same = parts_of("variant_effect", *words, path)
    assert all(torch.equal(value, before[key]) for key, value in same.network.state_dict().items())
    assert same.notes[-1] == f"weights loaded from {tmp_path / 'first'}"
    other = parts_of("variant_effect", table(["a", "b", "c"] * 20, "other.csv"), path)
    assert other.network.state_dict()["head.out.weight"].shape[0] == 3
    adapted = parts_of("domain_adaptation", *words, path, "model.pool=max")
    assert torch.equal(adapted.network.head.out.weight, before["head.out.weight"])


def test_a_value_goes_on_with_its_head_whatever_its_mean(finished, tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{''.join(rng.choice(list('ACGT'), 20))},{n / 3}" for n in range(30)]
    (tmp_path / "v.csv").write_text("\n".join(["sequence,label", *lines]))
    parts = parts_of(
        "variant_effect", f"data.path={tmp_path / 'v.csv'}", f"model.path={finished('values')}",
        "objective.target=value", "objective.label_smoothing=0",
    )  # fmt: skip
    assert "new head" not in parts.notes[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data.alphabet=rna"],
            r"data\.alphabet must be dna like the network of model\.path, got rna",
        ),
        (["data.tokenizer=kmer"], r"data\.tokenizer must be byte .* got kmer"),
    ],
)
def test_a_base_of_other_tokens_is_refused(finished, table, words, message):
    with pytest.raises(ConfigError, match=message):
        parts_of("variant_effect", table(["a", "b"]), f"model.path={finished('base')}", *words)


def test_a_network_that_sees_ahead_does_not_write(finished):
    with pytest.raises(ConfigError, match="sees later letters"):
        parts_of("generation", f"model.path={finished('letters')}")


def test_weights_that_do_not_fit_are_refused(finished, tmp_path, table):
    base = finished("base")
    for name in ("genomics.json", "model.safetensors"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    text = (tmp_path / "genomics.json").read_text().replace('"layers": 1', '"layers": 2')
    (tmp_path / "genomics.json").write_text(text)
    with pytest.raises(CheckpointError, match="do not match"):
        parts_of("variant_effect", table(["a", "b"] * 20), f"model.path={tmp_path}")


def test_a_base_of_a_plan_is_not_read(finished, table, tmp_path):
    (tmp_path / "genomics.json").write_text((finished("base") / "genomics.json").read_text())
    words = (table(["a", "b"] * 20), f"model.path={tmp_path}")
    parts = parts_of("variant_effect", *words, device=torch.device("meta"))
    assert parts.network.head.out.weight.device.type == "meta"
    with pytest.raises(ConfigError, match="the run is not finished"):
        parts_of("variant_effect", *words)


@pytest.mark.parametrize(
    ("labels", "words", "message"),
    [
        (["a"] * 30, [], "have the class a, so there is nothing to learn"),
        (["benign"] * 30, [], "have the class benign, so there is nothing to learn"),
        (
            ["0.1"] * 30,
            ["objective.target=value", "objective.label_smoothing=0"],
            r"have the value 0\.1",
        ),
        (
            ["a;b"] * 30,
            ["objective.target=labels", "objective.label_smoothing=0"],
            r"have the labels 'a;b' \(train\)",
        ),
        (
            ["a;b", "a", "b", "a"],
            ["objective.target=labels", "objective.label_smoothing=0", "data.validation_share=0.3"],
            r"have the labels .* \(validation\)",
        ),
        (
            ["a", "b"] * 9,
            ["objective.labels=[a, c]"],
            r"t\.csv, record \d+: the class must be .* got 'b'",
        ),
        (
            ["a", "1"] * 9,
            ["objective.target=value", "objective.label_smoothing=0"],
            r"t\.csv, record \d+: the label must be a number, got 'a'",
        ),
    ],
)
def test_what_nothing_can_be_learnt_from_is_refused(table, labels, words, message):
    with pytest.raises(ConfigError, match=message):
        parts_of("variant_effect", table(labels), *words)


def test_a_genome_of_one_class_is_refused(tmp_path):
    (tmp_path / "g.fa").write_text(f">chr1\n{'ACGT' * 100}\n")
    (tmp_path / "g.gff").write_text("##gff-version 3\nchr1\tx\tregion\t1\t400\t.\t+\t.\tID=r\n")
    words = (f"data.path={tmp_path / 'g.fa'}", f"data.features={tmp_path / 'g.gff'}")
    with pytest.raises(ConfigError, match=r"got region. Name some of them"):
        parts_of("annotation", *words)


def test_nothing_is_adapted_from_nowhere(table):
    with pytest.raises(ConfigError, match="needs a source domain"):
        parts_of("domain_adaptation", table(["a", "b"] * 20))


def test_both_strands_by_construction_need_tokens_of_a_letter(table):
    words = (table(["a", "b"] * 20), "model.reverse_complement=true")
    network = parts_of("variant_effect", *words).network.eval()
    parts = parts_of("variant_effect", *words)
    batch = parts.train.__getitems__([0, 1])
    turned = torch.from_numpy(parts.tokenizer.complement)[batch["tokens"][:, :20].flip(1)]
    real = batch["mask"][:, :20]
    torch.testing.assert_close(network(turned, real), network(batch["tokens"][:, :20], real))
    with pytest.raises(ConfigError, match="one letter per token"):
        parts_of("variant_effect", *words, "data.tokenizer=kmer")


def test_a_plan_of_both_strands_makes_shapes_too(table):
    words = (table(["a", "b"] * 20), "model.reverse_complement=true")
    network = parts_of("variant_effect", *words, device=torch.device("meta")).network
    assert network.head.out.weight.device.type == "meta"


def test_the_same_seed_gives_the_same_network_and_leaves_the_generator_alone(table):
    words = table(["a", "b"] * 20)
    state = torch.get_rng_state()
    one, two, other = (
        parts_of("variant_effect", words, f"seed={seed}").network for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.head.out.weight, two.head.out.weight)
    assert not torch.equal(one.head.out.weight, other.head.out.weight)


@pytest.mark.parametrize(
    "recipe",
    ["annotation", "variant_effect", "protein_function", "generation", "domain_adaptation"],
)
def test_a_preset_is_all_of_the_size_of_a_recipe(recipe):
    words = ["model.preset=base", "data.max_length=64"]
    asked = load_recipe(f"genomics/{recipe}", words).recipe
    config = build_parts(asked, device=torch.device("meta")).info.config
    assert (config.width, config.layers) == (768, 12)


def test_strands_are_not_told_apart_by_a_network_that_knows_none(tmp_path):
    (tmp_path / "g.fa").write_text(f">chr1\n{'ACGT' * 100}\n")
    gff = ["##gff-version 3", "chr1\tx\tgene\t9\t90\t.\t+\t.\tID=a"]
    (tmp_path / "g.gff").write_text("\n".join([*gff, gff[1].replace("+", "-").replace("9", "3")]))
    words = [f"data.path={tmp_path / 'g.fa'}", f"data.features={tmp_path / 'g.gff'}"]
    words += ["objective.labels=[none, gene+, gene-]", "data.max_length=64"]
    with pytest.raises(ConfigError, match=r"cannot separate gene\+ and gene-.*data.reverse_compl"):
        parts_of("annotation", *words, "model.reverse_complement=true")
    parts_of("annotation", *words, "data.reverse_complement=true")
