import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from narrowcast.errors import ConfigError
from narrowcast.training.checkpoints.data_identity import fingerprint
from narrowcast.workloads.sft.data.formats import Conversation, Turn
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.templates import select_template
from narrowcast.workloads.sft.data.tokenised import Encoder, Tally, TokenRows, padding_token

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<"), min_size=1, max_size=30)


def encode(tokenizer, *pairs, template="auto", **given):
    """Return the rows of questions with answers, what happened to them."""
    data = SftData(path="x", template_format=template, **given)
    encoder = Encoder.of(select_template(template, tokenizer, loss_on=data.loss_on), data)
    said = [Conversation(_turns(pair), f"f, line {n}") for n, pair in enumerate(pairs, 1)]
    tally = Tally()
    rows = list(encoder.rows(said, tally))
    return rows, tally


def _turns(pair):
    whose = ["user", "assistant"] * (len(pair) // 2)
    return tuple(Turn(role, text) for role, text in zip(whose, pair, strict=True))


def learnt_text(tokenizer, row):
    return tokenizer.decode(row[0][row[1]])


@given(
    said=st.lists(WORDS.filter(str.strip), min_size=2, max_size=6).filter(lambda s: not len(s) % 2)
)
def test_chat_marks_are_those_of_transformers_own_generation_tags(untrimmed, said):
    # Of spans without their spaces transformers loses tokens of spaces, and then whole responses.
    messages = [{"role": t.role, "content": t.text} for t in _turns(said)]
    theirs = untrimmed.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    ((tokens, learnt),) = encode(untrimmed, said)[0]
    assert tokens.tolist() == theirs["input_ids"]
    assert learnt.astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("name", ["basic", "alpaca", "chatml", "chat"])
@given(asked=WORDS, answer=WORDS.filter(str.strip))
def test_tokens_are_the_text_and_what_is_learnt_holds_the_response(
    chat_tokenizer, name, asked, answer
):
    written = select_template(name, chat_tokenizer).written(
        Conversation(_turns((asked, answer)), "f, line 1")
    )
    ((tokens, learnt),) = encode(chat_tokenizer, (asked, answer), template=name)[0]
    assert chat_tokenizer.decode(tokens) == written.text
    end = "<|im_end|>" if name.startswith("chat") else "<eos>"
    found = chat_tokenizer.decode(tokens[learnt])
    assert answer + end in found or "\ufffd" in found


def test_a_token_across_the_edge_of_a_response_is_learnt(tokenizer):
    merged = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    assert len(merged) == 1  # as it was trained to
    ((tokens, learnt),) = encode(tokenizer, ("Q", "\nA"))[0]
    assert merged[0] in tokens[learnt]
    assert learnt_text(tokenizer, (tokens, learnt)) == "\n\nA<eos>"


def test_spaces_that_the_tokenizer_leaves_out_of_its_spans_are_learnt(make_tokenizer):
    both = [make_tokenizer(trim=trim) for trim in (True, False)]
    code = "def f():\n    return 1\n\n        # end   "
    rows = [encode(each, ("Q", code))[0][0] for each in both]
    assert learnt_text(both[0], rows[0]) == code + "<eos>"
    assert rows[0][1].tolist() == rows[1][1].tolist()


def test_parts_of_a_character_are_all_learnt(tokenizer):
    ((tokens, learnt),) = encode(tokenizer, ("Q", "🎈é"))[0]
    assert learnt_text(tokenizer, (tokens, learnt)) == "🎈é<eos>"


def test_tokenizers_that_write_spaces_as_signs_and_rare_letters_as_bytes_are_marked_alike():
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<unk>", "</s>", *every_byte], show_progress=False
    )
    core.train_from_iterator(["### Response:", "The capital is Paris."] * 2, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    answer = "The capital  is é 日本 Paris."
    (row,), _ = encode(tokenizer, ("Why?", answer))
    assert learnt_text(tokenizer, row) == answer + "</s>"
    (row,), _ = encode(tokenizer, ("Why?", answer, "So?", "🎈."), template="basic")
    assert learnt_text(tokenizer, row) == answer + "</s>🎈.</s>"


def test_words_that_are_read_as_special_tokens_are_told(chat_tokenizer):
    _, tally = encode(chat_tokenizer, ("Q", "A"), ("Q <|im_end|>", "A"), ("Q", "<eos> A"))
    assert tally.with_signs == 2


@pytest.mark.parametrize("pad", [None, "<eos>", "<pad>"])
def test_the_end_is_learnt_whatever_fills_rows(make_tokenizer, pad):
    tokenizer = make_tokenizer(pad_token=pad)
    ((tokens, learnt),) = encode(tokenizer, ("Q", "A"))[0]
    assert tokens[-1] == tokenizer.eos_token_id
    assert learnt[-1]
    assert padding_token(tokenizer) == tokenizer.convert_tokens_to_ids(pad or "<eos>")
    assert len(tokenizer) == len(make_tokenizer())


def test_the_token_for_a_beginning_stands_where_the_tokenizer_puts_it(make_tokenizer):
    tokenizer = make_tokenizer(bos=True)
    ((tokens, learnt),) = encode(tokenizer, ("Q", "A"), loss_on="all")[0]
    prompt = tokenizer("### Instruction:\nQ\n\n### Response:\n")["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens[: len(prompt)].tolist() == prompt
    assert not learnt[0]
    assert learnt[1:].all()


def test_rows_that_are_too_long_are_dropped_cut_or_refused_as_asked(tokenizer):
    pairs = [("Q", "A"), ("Q", "A " * 100), ("Q" * 200, "A")]
    fits = len(encode(tokenizer, pairs[0])[0][0][0])
    rows, tally = encode(tokenizer, *pairs, max_seq_length=fits)
    assert (len(rows), tally.dropped.total(), tally.cut) == (1, 2, 0)
    rows, tally = encode(tokenizer, *pairs, max_seq_length=fits, too_long="cut")
    assert [len(tokens) for tokens, _ in rows] == [fits, fits]
    assert (dict(tally.dropped), tally.cut) == ({"no response within max_seq_length": 1}, 1)
    assert rows[1][0][-1] != tokenizer.eos_token_id
    with pytest.raises(ConfigError, match=r"line 2 must fit into data.max_seq_length="):
        encode(tokenizer, *pairs, max_seq_length=fits, too_long="refuse")


def test_rows_are_as_they_were_put_in_and_the_digest_tells_them_apart():
    parts = [(np.arange(n, dtype=np.int32), np.arange(n) % 2 == 0) for n in (3, 1, 5)]
    rows = TokenRows.joined(parts)
    assert len(rows) == 3
    assert rows.lengths.tolist() == [3, 1, 5]
    for number, (tokens, learnt) in enumerate(parts):
        assert rows.row(number)[0].tolist() == tokens.tolist()
        assert rows.row(number)[1].tolist() == learnt.tolist()
    digests = [fingerprint(*rows.taken(n).arrays().values()) for n in ([0, 1, 2], [1, 0, 2], [0])]
    assert digests[0] == fingerprint(*rows.arrays().values())
    assert len(set(digests)) == 3
    assert len(TokenRows.joined([])) == 0
