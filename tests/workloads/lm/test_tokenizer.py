import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis.strategies import text
from tokenizers import pre_tokenizers

from narrowcast.errors import ConfigError
from narrowcast.workloads.lm.bpe import BpeTokenizer, read_vocabulary
from narrowcast.workloads.lm.text import ByteTokenizer, read_text

DATA = Path(__file__).parents[3] / "../shared/data"
GPT2 = DATA / "tok_gpt2"
needs_gpt2 = pytest.mark.skipif(
    not GPT2.is_dir(), reason="needs GPT-2's vocab.json and merges.txt in ../shared/data/tok_gpt2"
)

ENGLISH = read_text(["python-topics"])[:50_000]
TRAINED = BpeTokenizer.trained(ENGLISH, size=400)
BYTES = ByteTokenizer()
ALPHABET = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


@pytest.fixture(scope="module")
def gpt2() -> BpeTokenizer:
    return BpeTokenizer.loaded(GPT2)


def write_vocabulary(folder: Path, vocab: object, merges: str = "#version: 0.2\n") -> Path:
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    return folder


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
@given(words=text())
def test_any_text_comes_back_as_it_was(tokenizer, words):
    assert tokenizer.decode(tokenizer.encode(words).tolist()) == words


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
@given(words=text())
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer, words):
    lengths = tokenizer.byte_lengths()
    assert lengths[tokenizer.encode(words)].sum() == len(words.encode())


def test_bytes_are_their_own_tokens():
    assert BYTES.encode("Aé").tolist() == [65, 0xC3, 0xA9]


@pytest.mark.parametrize("tokenizer", [BYTES, TRAINED], ids=["bytes", "bpe"])
def test_half_a_character_is_shown_as_such(tokenizer):
    half = tokenizer.encode("é").tolist()[:1] if tokenizer is BYTES else [max(ALPHABET.values())]
    assert "\ufffd" in tokenizer.decode(half)


def test_training_learns_as_many_tokens_as_asked_and_shortens_the_text():
    assert TRAINED.size == 400
    assert len(TRAINED.encode(ENGLISH)) < 0.6 * len(BYTES.encode(ENGLISH))


def test_training_twice_gives_the_same_tokens():
    again = BpeTokenizer.trained(ENGLISH, size=400)
    assert np.array_equal(again.encode(ENGLISH), TRAINED.encode(ENGLISH))


def test_tokens_take_two_bytes_each():
    assert {BYTES.encode("a").dtype, TRAINED.encode("a").dtype} == {np.dtype(np.uint16)}


@needs_gpt2
def test_gpt2_splits_hello_world_as_published(gpt2):
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.size == 50_257


@needs_gpt2
@given(words=text())
@settings(max_examples=30)
def test_gpt2_gives_any_text_back(gpt2, words):
    assert gpt2.decode(gpt2.encode(words).tolist()) == words


@needs_gpt2
@pytest.mark.skipif(
    not (DATA / "text/wikitext2_test.txt").is_file(), reason="needs WikiText-2 in ../shared/data"
)
def test_a_long_text_cut_into_pieces_has_the_tokens_it_has_in_one(gpt2):
    words = (DATA / "text/wikitext2_test.txt").read_text(encoding="utf-8")
    reference = tokenizers.ByteLevelBPETokenizer.from_file(
        str(GPT2 / "vocab.json"), str(GPT2 / "merges.txt")
    )
    assert gpt2.encode(words).tolist() == reference.encode(words).ids


def test_a_written_vocabulary_is_read_again(tmp_path):
    vocab = ALPHABET | {"ab": 256}
    tokenizer = BpeTokenizer.loaded(write_vocabulary(tmp_path, vocab, "#version: 0.2\na b\n"))
    assert tokenizer.encode("cab").tolist() == [ALPHABET["c"], 256]


def test_a_folder_without_the_files_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"vocab.json cannot be read.*data.tokenizer must be bytes"
    ):
        BpeTokenizer.loaded(tmp_path)


def test_a_vocabulary_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "vocab.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize("vocab", [["a"], {}, {"a": 1}, {"a": "0"}, {"a": 0, "b": 0}, {"a": True}])
def test_a_vocabulary_that_does_not_number_its_tokens_is_refused(tmp_path, vocab):
    with pytest.raises(ConfigError, match="must map each token to its number"):
        read_vocabulary(write_vocabulary(tmp_path, vocab))


def test_a_vocabulary_that_would_drop_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must have all 256 bytes; 254 are missing"):
        read_vocabulary(write_vocabulary(tmp_path, {"a": 0, "b": 1}))


def test_merges_of_another_vocabulary_are_refused(tmp_path):
    folder = write_vocabulary(tmp_path, ALPHABET, "#version: 0.2\na b\n")
    with pytest.raises(ConfigError, match=r"merges 'a b'.*both files of the same tokenizer"):
        BpeTokenizer.loaded(folder)
