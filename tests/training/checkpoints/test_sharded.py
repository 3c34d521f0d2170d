"""Sharded checkpoints, written and read by one to four processes with gloo."""

import ast
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from tests.ranks import on_ranks
from tests.training.checkpoints import rank_program
from tests.training.checkpoints.rank_program import Pool

import narrowcast as nc
from narrowcast.errors import CheckpointError, ConfigError, UnsupportedError
from narrowcast.kernels.adamw.twin import decode

pytest.importorskip("torch.distributed")
SOURCE = Path(nc.__file__).parent
BF16 = "bf16, params=bf16, master="


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = Pool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "how",
    [
        {"ema_decay": 0.9},
        {"policy": f"{BF16}split", "ema_decay": 0.9},
        {"policy": f"{BF16}kahan"},
        {"policy": f"{BF16}stochastic", "optimizer": "plain adamw"},
        {"policy": f"{BF16}fp32"},
        {"policy": f"{BF16}split", "sharding": "part"},
        {"policy": f"{BF16}split", "optimizer": "sgd"},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
def test_checkpoint_of_4_ranks_is_the_same_on_1_2_and_3_ranks_and_back(ranks, tmp_path, how):
    folder = tmp_path / "checkpoint"
    ranks.run(4, "save", folder, **how)
    for count in (1, 2, 3):
        again = f"{folder}.again" if count == 3 else None
        ranks.run(count, "load", folder, again, **how)
    ranks.run(4, "load", f"{folder}.again", **how)


def test_checkpoint_of_hsdp_is_the_same_in_fsdp_and_on_one_device(ranks, tmp_path):
    folder, policy = tmp_path / "checkpoint", f"{BF16}split"
    ranks.run(4, "save", folder, sharding="hsdp", policy=policy)
    assert {path.name for path in folder.glob("*.safetensors")} == {
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    }
    ranks.run(2, "load", folder, f"{folder}.again", sharding="fsdp", policy=policy)
    ranks.run(4, "load", f"{folder}.again", sharding="hsdp", policy=policy)
    ranks.run(1, "load", folder, sharding="none", policy=policy)


def test_groups_that_shard_the_same_model_are_saved_as_one(ranks, tmp_path):
    ranks.run(4, "save", tmp_path / "checkpoint", sharding="groups")
    ranks.run(1, "load", tmp_path / "checkpoint", sharding="none")
    ranks.run(3, "load", tmp_path / "checkpoint", sharding="fsdp")


def test_training_continues_after_resharding_as_if_never_interrupted(ranks, tmp_path):
    how = {"policy": f"{BF16}split", "ema_decay": 0.9}
    folder = tmp_path / "checkpoint"
    ranks.run(4, "save", folder, steps=2, **how)
    ranks.run(2, "load", folder, f"{folder}.again", **how)
    straight = ranks.run(4, "resume", None, 4, **how)
    assert ranks.run(4, "resume", f"{folder}.again", 2, **how) == straight


def moments(folder, weight, name):
    """Return codes and scales of a moment as its ranks have written them."""
    key = f"run/optimizer/0/state/{weight}/{name}"
    files = [load_file(each) for each in sorted(folder.glob("*.safetensors"))]
    pairs = [(each[key], each[key + "_scale"]) for each in files if key in each]
    return [torch.cat([each[i].flatten() for each in pairs]) for i in (0, 1)], pairs


def test_8_bit_moments_are_exact_where_shards_end_at_blocks_and_else_rounded(ranks, tmp_path):
    how = {"policy": "bf16, moments=int8", "width": 256}
    four, one, back = (tmp_path / name for name in ("four", "one", "back"))
    ranks.run(4, "save", four, **how)
    ranks.run(1, "load_again", four, one, **how)
    ranks.run(4, "load_again", one, back, **how)
    for name in ("exp_avg", "exp_avg_sq"):
        for matrix in (0, 4):  # rows of 16 and 256: each shard ends with a block of 256
            (codes, scales), _ = moments(four, matrix, name)
            for other in (one, back):
                found, _ = moments(other, matrix, name)
                assert torch.equal(codes, found[0])
                assert torch.equal(scales, found[1])
        for vector in (1, 2, 3):  # 64 numbers on each rank, and one block of all
            _, parts = moments(four, vector, name)
            values = torch.cat([decode(*part) for part in parts])
            (codes, scales), _ = moments(one, vector, name)
            largest_spacing = 253 / 127**2 if name == "exp_avg" else 1 - (254 / 255) ** 4
            difference = (decode(codes, scales) - values).abs().max()
            assert 0 < difference <= largest_spacing / 2 * scales.max() * 1.001


def test_what_differs_by_rank_comes_back_to_the_same_rank(ranks, tmp_path):
    ranks.run(2, "save_own", tmp_path / "checkpoint")
    assert ranks.run(2, "load_own", tmp_path / "checkpoint") == [0, 1]
    assert ranks.run(1, "load_own", tmp_path / "checkpoint") == [0]
    assert ranks.run(3, "load_own", tmp_path / "checkpoint") == [0, 1, 0]


def test_frozen_fp8_weights_are_those_of_rank_0_under_ddp(ranks):
    (weights, grad), other = ranks.run(2, "frozen_fp8_in_ddp")
    assert len(weights) == 1
    assert other == (weights, grad)


def test_amax_histories_on_other_ranks_are_the_largest_of_all(ranks, tmp_path):
    one, other = ranks.run(2, "save_histories", tmp_path / "checkpoint")
    assert one != other
    assert ranks.run(2, "load_histories", tmp_path / "checkpoint") == [one, other]
    largest = torch.maximum(torch.tensor(one), torch.tensor(other)).tolist()
    assert ranks.run(1, "load_histories", tmp_path / "checkpoint") == [largest]
    assert ranks.run(3, "load_histories", tmp_path / "checkpoint") == [largest] * 3


def test_damaged_or_foreign_checkpoint_raises_on_every_rank_and_loads_nothing(ranks, tmp_path):
    good = tmp_path / "good"
    ranks.run(2, "save", good)

    def damaged(name):
        shutil.copytree(good, folder := tmp_path / name)
        return folder, folder / "rank-00001.safetensors"

    folder, file = damaged("missing")
    file.unlink()
    errors = ranks.run(2, "load_error", folder)
    folder, file = damaged("cut")
    file.write_bytes(file.read_bytes()[:-1])
    errors += ranks.run(2, "load_error", folder)
    folder, file = damaged("changed")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    errors += ranks.run(2, "load_error", folder)
    assert all("rank-00001.safetensors" in error for error in errors)
    folder, _ = damaged("index")
    index = (folder / "index.json").read_text()
    (folder / "index.json").write_text(index.replace('"offset": [0', '"offset": [1', 1))
    assert all("index.json was changed" in error for error in ranks.run(2, "load_error", folder))
    for settings, what in (({"policy": "bf16"}, "policy"), ({"width": 34}, "float32 of (34, 16)")):
        assert all(what in error for error in ranks.run(2, "load_error", good, **settings))


def test_background_saves_are_waited_for_and_their_errors_surface(ranks, tmp_path):
    (tmp_path / "file").touch()
    bad = tmp_path / "file" / "two"
    for error in ranks.run(2, "save_in_background", tmp_path / "one", bad, backend=None):
        assert "Cannot write" in error


def test_background_save_needs_a_process_group_beside_that_of_training(tmp_path):
    def save(rank):
        run = prepared()
        nc.save_checkpoint(run, tmp_path / "checkpoint", extra={"rank": rank})
        with pytest.raises(UnsupportedError, match=r"background=True.*gloo"):
            nc.save_checkpoint(run, tmp_path / "checkpoint", background=True)
        return nc.load_checkpoint(run, tmp_path / "checkpoint")

    assert on_ranks(2, save) == [{"rank": 0}, {"rank": 1}]


def test_whole_model_of_shards_loads_in_plain_torch(ranks, tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "model.safetensors"
    results = ranks.run(3, "save_whole", path, tmp_path / "file" / "model.safetensors")
    for error, full, ema in results:
        assert "Cannot write" in error
        model = rank_program.network(seed=1)
        load_model(model, path)
        assert {name: t.tolist() for name, t in model.state_dict().items()} == full
        saved = load_file(tmp_path / "ema.safetensors")
        rounded = {name: torch.tensor(ema[name]).bfloat16() for name in ema}
        assert all(torch.equal(saved[name], rounded[name]) for name in rounded)


@pytest.fixture
def mesh(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    where = f"file://{tmp_path / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_folder_of_a_sharded_transformers_model_loads_there(mesh, tmp_path):
    from torch.distributed.fsdp import fully_shard

    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = nc.prepare(model, optimizer, policy="fp32", fused_optimizer=True)
    tokens = torch.arange(8).view(1, 8)
    with run.autocast():
        loss = run.model(input_ids=tokens, labels=tokens).loss
    run.step(loss)
    nc.save_model(run, tmp_path / "model")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(again) is transformers.LlamaForCausalLM
    full = run.fp32_state_dict()
    assert all(torch.equal(t, full[n].full_tensor()) for n, t in again.state_dict().items())


@pytest.mark.parametrize("weights", ["ema", "eval", "best"])
def test_weights_that_a_run_does_not_have_raise(tmp_path, weights):
    with pytest.raises(ConfigError, match=f"weights.*{weights}"):
        nc.save_model(prepared(), tmp_path / "model.safetensors", weights=weights)


def prepared(**settings):
    return rank_program.prepared("none", **settings)


def test_a_crash_while_a_checkpoint_is_replaced_leaves_the_old_or_the_new_one(tmp_path):
    run, folder = prepared(), tmp_path / "checkpoint"
    rank_program.train(run, 1)
    nc.save_checkpoint(run, folder, extra={"saved": 1})
    folder.rename(tmp_path / "checkpoint.previous")  # killed between the two renames
    assert nc.load_checkpoint(prepared(), folder) == {"saved": 1}
    nc.save_checkpoint(run, folder, extra={"saved": 2})
    assert nc.load_checkpoint(prepared(), folder) == {"saved": 2}
    shutil.copytree(folder, tmp_path / "checkpoint.previous")  # killed before the old one is gone
    shutil.copytree(folder, tmp_path / "checkpoint.tmp-1")  # killed before the first rename
    shutil.copytree(folder, tmp_path / "checkpoint.previous.tmp-removed")  # killed at the end
    nc.save_checkpoint(run, folder, extra={"saved": 3})
    assert nc.load_checkpoint(prepared(), folder) == {"saved": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_tied_weights_are_stored_once(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[1].weight = model[0].weight
    run = nc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    nc.save_checkpoint(run, tmp_path / "checkpoint")
    saved = load_file(tmp_path / "checkpoint" / "rank-00000.safetensors")
    assert [name for name, each in saved.items() if each.numel() == 64 * 64] == [
        "run/weights/0.weight"
    ]
    nc.load_checkpoint(run, tmp_path / "checkpoint")


def test_value_that_json_does_not_have_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"extra/loader: .*object"):
        nc.save_checkpoint(prepared(), tmp_path / "checkpoint", extra={"loader": object()})
    assert not (tmp_path / "checkpoint").exists()


def test_folder_that_is_no_sharded_checkpoint_raises(tmp_path):
    with pytest.raises(CheckpointError, match=r"no index\.json in it"):
        nc.load_checkpoint(prepared(), tmp_path)


def test_no_module_unpickles_what_it_reads():
    allowed = {SOURCE / "precision/weights/trained.py"}  # sends weights to processes of its own
    found = []
    for path in set(SOURCE.rglob("*.py")) - allowed:
        text = path.read_text()
        if not any(word in text for word in ("pickle", "dill", "joblib", "torch.load", "_object")):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [(path, n) for n in names if n.split(".")[0] in ("pickle", "dill", "joblib")]
            if isinstance(node, ast.Attribute):
                owner = getattr(node.value, "id", "")
                loads = node.attr == "load" and owner == "torch"
                sends = node.attr.endswith(("_object_list", "er_object"))
                if loads or (sends and path.is_relative_to(SOURCE / "training/checkpoints")):
                    found.append((path, f"{owner}.{node.attr}"))
    assert found == []
