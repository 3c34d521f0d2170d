"""`narrowcast ica`: networks found, shown and tested from the command line."""

import json
import subprocess
import sys

import pytest
import torch

from narrowcast.cli.entry import run_command
from narrowcast.workloads.sft.ica import functional_networks, load_networks
from narrowcast.workloads.sft.models.loading import load_model, load_tokenizer

TEXT = "\n".join(f"{n} times {n} is {n * n}, and {n} and {n} are {n + n}." for n in range(200))
FEW = ["--samples", "6", "--max-length", "48", "--device", "cpu"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A text, rows, and networks of the tiny model."""
    folder = tmp_path_factory.mktemp("ica")
    (folder / "text.txt").write_text(TEXT)
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["ica", "build", "tiny", str(folder / "text.txt"), "-o", str(folder / "n.json"), *FEW]
    assert run_command([*words, "--components", "3", "--top-k", "8"]) == 0
    return folder


@pytest.fixture
def ica(capsys):
    """Run a command; return its exit code, what it printed, and what it complained of."""

    def run(*words):
        code = run_command(["ica", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_build_finds_what_the_library_finds_and_says_where_it_comes_from(shelf):
    from narrowcast.workloads.sft.ica import ICA, TopK
    from narrowcast.workloads.sft.ica.study.documents import draw_documents, model_inputs

    built = load_networks(shelf / "n.json")
    drawn = draw_documents(
        [str(shelf / "text.txt")], load_tokenizer("tiny"), samples=6, max_length=48
    )
    assert [each["input_ids"].shape for each in drawn.documents] == [(1, 48)] * 6
    model = load_model("tiny").eval()
    expected = functional_networks(
        model, model_inputs(drawn.documents), ica=ICA(components=3), selector=TopK(8)
    )
    assert built.networks == expected.networks
    assert (built.provenance.model, built.provenance.selector) == ("tiny", "top-k=8")
    assert "text.txt (288 tokens of 6 documents)" in built.provenance.data


def test_build_takes_skip_first_clip_activations_and_max_iter(shelf, ica, tmp_path):
    from narrowcast.workloads.sft.ica import ICA
    from narrowcast.workloads.sft.ica.study.documents import draw_documents, model_inputs

    words = ["build", "tiny", shelf / "text.txt", "-o", tmp_path / "n.json", *FEW]
    words += ["--components", "3", "--skip-first", "4", "--clip-activations", "97"]
    code, out, _ = ica(*words, "--max-iter", "3")
    assert code == 0
    assert "signals skip_first=4, clip_activations=97" in out
    assert "after 3 iterations" in out
    drawn = draw_documents(
        [str(shelf / "text.txt")], load_tokenizer("tiny"), samples=6, max_length=48
    )
    expected = functional_networks(
        load_model("tiny").eval(),
        model_inputs(drawn.documents),
        ica=ICA(components=3, clip_activations=97, max_iter=3),
        skip_first=4,
    )
    assert load_networks(tmp_path / "n.json").networks == expected.networks


def test_rows_are_read_as_conversations(shelf, ica, tmp_path):
    words = ["build", "tiny", shelf / "rows.jsonl", "-o", tmp_path / "n.json", *FEW]
    code, out, err = ica(*words, "--dtype", "bfloat16", "--layers", "0:2")
    assert code == 0
    assert "question+answer" in err
    built = load_networks(tmp_path / "n.json")
    assert built.layout.layers == (0, 1)
    assert built.provenance.dtype in ("bfloat16", "float32")  # where it was too coarse, told
    assert "written to" in out


def test_show_prints_a_row_for_each_component_and_draws_a_page(shelf, ica, tmp_path):
    code, out, _ = ica("show", shelf / "n.json", "--html", tmp_path / "n.html")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:2] for row in rows[-3:]] == [["0", "8"], ["1", "8"], ["2", "8"]]
    page = (tmp_path / "n.html").read_text()
    assert page.count("<svg") == 3
    assert "prefers-color-scheme: dark" in page
    assert not any(word in page for word in ("<script", "http:", "https:"))


def test_ablate_says_it_in_a_sentence_and_writes_what_it_measured(shelf, ica, tmp_path):
    words = ["ablate", "tiny", shelf / "text.txt", "--networks", shelf / "n.json", *FEW]
    words += ["--random", "3", "--no-each", "--components", "0,2"]
    written = ["-o", tmp_path / "a.json", "--html", tmp_path / "a.html"]
    code, out, _ = ica(*words, *written)
    assert code == 0
    assert "ablating components 0, 2, " in out.splitlines()[-3]
    found = json.loads((tmp_path / "a.json").read_text())
    assert len(found["lesion"]["equal"]["masks"]) == 3
    code, out, _ = ica(*words, "--json")
    assert json.loads(out) == found
    assert "<svg" in (tmp_path / "a.html").read_text()


def test_help_says_what_it_does_without_torch():
    code = (
        "import sys; from narrowcast.cli.entry import run_command;"
        "run_command(['--help']); run_command(['ica', 'build', '--help']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "ica        finds, shows and tests functional networks" in done.stdout
    assert "--percentile" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["build", "tiny", "missing.txt"], "missing.txt does not exist"),
        (["build", "./nowhere", "missing.jsonl"], "missing.jsonl does not exist"),
        (["build", "tiny", "{empty}"], "must have at least two tokens, got 0"),
        (["build", "tiny", "{text}", "{rows}"], "not both"),
        (["build", "tiny", "{text}", "--layers", "0:9"], "has layer 8, but the model has 4 layers"),
        (["build", "tiny", "{text}", "--top-k", "5", "--zscore", "2"], "Keep one"),
        (["build", "tiny", "{text}", "--two-sided"], "--two-sided needs --zscore"),
        (["build", "tiny", "{text}", "--percentile", "100"], "less than 100"),
        (["build", "tiny", "{text}", "--clip-activations", "1"], "a percentile above 50"),
        (["build", "tiny", "{text}", "--skip-first", "600"], "more than skip_first=600 tokens"),
        (["build", "tiny", "{text}", "--max-length", "999999"], "--max-length must be at most 512"),
        (["build", "tiny", "{text}", "-o", "nowhere/n.json"], "there is no folder nowhere"),
        (["build", "tiny", "{text}", "--device", "abacus"], "--device abacus"),
        (["build", "./nowhere", "{text}"], "does not exist"),
        (["show", "{text}"], "not JSON"),
        (["ablate", "tiny", "{text}", "--networks", "{other}"], "2 layers, but this model has 4"),
        (
            ["ablate", "tiny", "{text}", "--networks", "{n}", "--components", "7"],
            "component must be one of 0 to 2, got 7",
        ),
        (["ablate", "tiny", "{text}", "--networks", "{n}", "--components", "x"], "such as 0,2"),
        (
            ["ablate", "tiny", "{text}", "--networks", "{n}", "--samples", "1"],
            "needs more documents",
        ),
        (["ablate", "tiny", "{text}", "--networks", "{n}", "--share", "2"], "at most 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(shelf, ica, tmp_path, monkeypatch, words, said):
    (tmp_path / "empty.txt").write_text("")
    other = json.loads((shelf / "n.json").read_text())
    other["layout"] |= {"depth": 2, "layers": [0, 1]}
    other["networks"] = {"0": {"0": [1]}}
    other["scores"] = {}
    (tmp_path / "other.json").write_text(json.dumps(other))
    places = {"text": shelf / "text.txt", "rows": shelf / "rows.jsonl", "n": shelf / "n.json"}
    places |= {"empty": tmp_path / "empty.txt", "other": tmp_path / "other.json"}
    monkeypatch.chdir(tmp_path)
    code, _, err = ica(*(word.format(**places) for word in words))
    assert code == 2
    assert said in err
    (line,) = [each for each in err.splitlines() if each.startswith("narrowcast: ")]
    assert "Traceback" not in err
    assert said in line


def test_a_model_without_blocks_that_are_recognised_is_refused(shelf, ica, tmp_path):
    """Of experts, several in a block, as a mixture of them has."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=512,
        num_local_experts=2,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "moe")
    load_tokenizer("tiny").save_pretrained(tmp_path / "moe")
    code, _, err = ica("build", tmp_path / "moe", shelf / "text.txt", *FEW)
    assert code == 3
    assert "has no list of blocks with one MLP each" in err


@pytest.mark.parametrize("command", [["build"], ["ablate", "--networks", "{n}"]])
def test_a_folder_of_llama2c_is_named_as_such(shelf, ica, tmp_path, command):
    for name in ("stories260K.bin", "tok512.bin"):
        (tmp_path / name).write_bytes(bytes(64))
    verb, *options = (word.format(n=shelf / "n.json") for word in command)
    code, _, err = ica(verb, tmp_path, shelf / "text.txt", *options, *FEW)
    assert code == 3
    assert "is a llama2.c model" in err
    assert "save_pretrained" in err
