import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from narrowcast.errors import CheckpointError, ConfigError
from narrowcast.workloads.genomics.models.config import GenomicConfig
from narrowcast.workloads.genomics.models.heads import SequenceHead
from narrowcast.workloads.genomics.models.model import GenomicModel, Network
from narrowcast.workloads.genomics.network_info import (
    FILE,
    NetworkInfo,
    load_into,
    read_network_info,
    read_weights,
)

KEPT = NetworkInfo(
    config=GenomicConfig(vocab_size=12, width=8, layers=1, max_length=32, dropout=0.25),
    alphabet="dna", tokenizer="kmer", kmer=3, overlap=1, task="variant_effect", target="value",
    classes=("a", "b;c", "ü"), pairs=True, pool="max", max_length=32, centre=-0.1, spread=3.7,
)  # fmt: skip


def test_what_is_written_is_read(tmp_path):
    KEPT.write(tmp_path)
    assert read_network_info(str(tmp_path)) == (KEPT, tmp_path)


def damage(**changes):
    def change(kept):
        return {**kept, **changes}

    return change


def of_config(**changes):
    return lambda kept: {**kept, "config": {**kept["config"], **changes}}


@pytest.mark.parametrize(
    "change",
    [
        lambda kept: [],
        lambda kept: None,
        lambda kept: {key: value for key, value in kept.items() if key != "alphabet"},
        lambda kept: {key: value for key, value in kept.items() if key != "config"},
        damage(classes="abc"),
        damage(classes=[1, 2]),
        damage(pool="median"),
        damage(pairs=1),
        damage(max_length="32"),
        damage(centre=None),
        of_config(width=0),
        of_config(layers=2.5),
        of_config(backbone="mamba"),
        of_config(vocab_size="12"),
    ],
)
def test_a_damaged_file_is_no_traceback(tmp_path, change):
    KEPT.write(tmp_path)
    path = tmp_path / FILE
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(CheckpointError, match=r"genomics\.json is damaged"):
        read_network_info(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[" * 100_000, b'{"config": {}}'])
def test_a_file_that_is_cut_off_is_no_traceback(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"genomics\.json is damaged"):
        read_network_info(str(tmp_path))


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Give the folder of a finished genomics run"):
        read_network_info(str(tmp_path))
    with pytest.raises(ConfigError, match=r"the run is not finished. Run narrowcast resume"):
        read_weights(tmp_path)


def test_damaged_weights_are_no_traceback(tmp_path):
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    assert torch.equal(read_weights(tmp_path)["a"], torch.ones(100))
    for content in (b"", whole[:50], whole[:-8]):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            read_weights(tmp_path)


def network(seed, **changes):
    torch.manual_seed(seed)
    config = replace(KEPT.config, **changes)
    return Network(GenomicModel(config), SequenceHead(config.width, 3))


@pytest.mark.parametrize("head", [True, False])
def test_weights_are_taken_over_bit_for_bit_with_the_head_or_without(head):
    one, two, untouched = network(0), network(1), network(1).state_dict()
    load_into(two, one.state_dict(), head=head)
    for key, value in two.state_dict().items():
        from_one = head or key.startswith("backbone.")
        assert torch.equal(value, (one.state_dict() if from_one else untouched)[key])


def test_weights_of_another_network_are_refused():
    with pytest.raises(CheckpointError, match="has another shape"):
        load_into(network(0), network(0, width=16).state_dict(), head=True)
    with pytest.raises(CheckpointError, match="is missing"):
        load_into(network(0, layers=2), network(0).state_dict(), head=False)


def test_a_finished_run_keeps_what_a_prediction_needs(finished):
    folder = finished("pairs")
    kept, _ = read_network_info(str(folder))
    assert (kept.pairs, kept.task, kept.target) == (True, "variant_effect", "class")
    assert set(kept.classes) == {"harmful", "<b>benign</b>"}
    shapes = {key: value.shape for key, value in load_file(folder / "model.safetensors").items()}
    assert shapes["head.out.weight"] == (2, 2 * kept.config.width)
    values, _ = read_network_info(str(finished("values")))
    assert values.classes == ()
    assert values.spread > 0
