import gzip
import json
from dataclasses import replace
from itertools import islice

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.packing import IGNORED
from narrowcast.workloads.sft.data.prepare import prepare_data
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.sources import read_rows

ROWS = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(40)]


def test_rows_become_batches_to_train_and_to_validate_on(write, settings, tokenizer):
    data = prepare_data(settings(write(ROWS)), tokenizer, seed=0)
    assert (len(data.train), len(data.validation)) == (36, 4)
    batch = data.train.__getitems__([0, 5])
    learnt = batch["labels"][0][batch["labels"][0] != IGNORED]
    assert tokenizer.decode(learnt).startswith("It is ")
    assert tokenizer.decode(learnt).endswith(".<eos>")
    report = data.report
    assert report.formats == ("question+answer",)
    assert (report.rows_read, report.train_rows, report.validation_rows) == (40, 36, 4)
    assert report.tokens == len(data.train.rows.tokens)
    assert report.lines()[0] == (
        "40 rows read as question+answer, rendered with template basic: "
        "36 training rows, 4 validation rows"
    )


def test_no_validation_can_be_asked_for(write, settings, tokenizer):
    data = prepare_data(settings(write(ROWS), validation_split=0.0), tokenizer, seed=0)
    assert data.validation is None
    assert len(data.train) == 40


def test_files_of_different_formats_go_together(write, settings, tokenizer, tmp_path):
    write(ROWS[:3], "a.jsonl")
    write([{"prompt": "P", "completion": "C"}], "b.jsonl")
    held = write(ROWS[2:5], "held.jsonl")
    given = settings(tmp_path / "[ab].jsonl", validation_path=str(held))
    report = prepare_data(given, tokenizer, seed=0).report
    assert report.formats == ("prompt+completion", "question+answer")
    assert (report.train_rows, report.validation_rows, report.repeated_rows) == (4, 3, 1)
    assert "1 validation rows are also training rows" in report.lines()


EMPTY = [
    ({"question": "Q", "answer": " "}, "the response is empty"),
    ({"question": "Q", "answer": None}, "the response is empty"),
]
CHATS = [
    ([("user", "Q")], "there is no assistant message"),
    ([("user", "Q"), ("assistant", "A"), ("user", "Q")], "the last turn is not from the assistant"),
    ([("user", "Q"), ("assistant", ""), ("user", "Q"), ("assistant", "A")], "response is empty"),
]
EMPTY += [
    ({"messages": [{"role": role, "content": text} for role, text in chat]}, said)
    for chat, said in CHATS
]


@pytest.mark.parametrize(("row", "said"), EMPTY)
def test_a_row_without_an_answer_is_refused_by_line_or_dropped_and_counted(
    row, said, write, settings, chat_tokenizer
):
    good = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    rows = [ROWS[0] if "answer" in row else good, row]
    path = write(rows)
    with pytest.raises(ConfigError, match=rf"rows.jsonl, line 2: .*{said}. Fix the row, or write"):
        prepare_data(settings(path, validation_split=0.0), chat_tokenizer, seed=0)
    dropping = settings(path, validation_split=0.0, empty_response="drop")
    report = prepare_data(dropping, chat_tokenizer, seed=0).report
    assert report.dropped == {"no response": 1}
    assert "1 rows dropped: no response" in report.lines()


def test_half_a_character_is_refused_with_its_line(write, settings, tokenizer):
    path = write([*ROWS[:2], {"question": "\ud800", "answer": "A"}])
    with pytest.raises(ConfigError, match=r"rows.jsonl, line 3: .* lone surrogate"):
        prepare_data(settings(path), tokenizer, seed=0)


def test_limits_in_characters_drop_rows_and_say_so(write, settings, tokenizer):
    rows = [
        *ROWS[:4],
        {"question": "Q" * 50, "answer": "A"},
        {"question": "Q", "answer": "A" * 60},
    ]
    given = settings(write(rows), response_max_length=59, instruction_max_length=49)
    assert prepare_data(given, tokenizer, seed=0).report.dropped == {
        "instruction longer than instruction_max_length": 1,
        "response longer than response_max_length": 1,
    }


def test_data_of_which_nothing_is_left_is_refused(write, settings, tokenizer):
    with pytest.raises(ConfigError, match=r"data.path: no rows are left \(40: more tokens th"):
        prepare_data(settings(write(ROWS), max_seq_length=4), tokenizer, seed=0)


def test_the_digest_is_another_one_for_other_tokens_or_marks(write, settings, tokenizer):
    path = write(ROWS)
    made = [
        prepare_data(settings(path, **given), tokenizer, seed=seed).digest()
        for seed, given in [(0, {}), (0, {"packing": True}), (0, {"loss_on": "all"}), (1, {})]
    ]
    assert made[0] == made[1]
    assert len(set(made)) == 3


def test_packing_loses_nothing_and_is_told(write, settings, tokenizer):
    path = write(ROWS)
    plain = prepare_data(settings(path), tokenizer, seed=0)
    packs = prepare_data(settings(path, packing=True, max_seq_length=128), tokenizer, seed=0)
    batch = packs.train.__getitems__(list(range(len(packs.train))))
    assert batch["input_ids"].shape[1] == 128
    assert (batch["labels"] != IGNORED).sum() == plain.report.learnt_tokens
    assert packs.report.efficiency > 0.7
    assert any(line.startswith("packed into") for line in packs.report.lines())


def test_a_cache_gives_the_same_and_is_made_anew_where_it_is_damaged(
    write, settings, tokenizer, tmp_path
):
    path, folder = write(ROWS), tmp_path / "deep/cache"
    given = settings(path, pretokenize=True, pretokenize_cache_dir=str(folder))
    first, again = (prepare_data(given, tokenizer, seed=0) for _ in range(2))
    assert (first.report.cached, again.report.cached) == (False, True)
    assert first.digest() == again.digest()
    assert again.report.rows_read == 40
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:-1], whole[:100], whole[:-9] + b"\1" + whole[-8:], b"x" * 4000):
        file.write_bytes(damaged)
        mended = prepare_data(given, tokenizer, seed=0)
        assert mended.digest() == first.digest()
        assert "are damaged" in mended.report.lines()[-1]
        assert file.read_bytes() == whole


def test_what_the_cache_tells_is_what_was_told(write, settings, tokenizer, tmp_path):
    rows = [*ROWS, {"question": "Q", "answer": ""}, {"question": "Q", "answer": "<eos>" * 9}]
    given = settings(
        write(rows),
        empty_response="drop",
        pretokenize=True,
        pretokenize_cache_dir=str(tmp_path / "cache"),
    )
    first, again = (prepare_data(given, tokenizer, seed=0).report for _ in range(2))
    assert replace(again, cached=False) == first
    assert (first.dropped, first.with_signs) == ({"no response": 1}, 1)


def test_whatever_changes_the_tokens_is_kept_apart(write, settings, tokenizer, make_tokenizer):
    path = write(ROWS)
    other = make_tokenizer(trim=False)
    cases = [
        ({}, tokenizer),
        ({"max_seq_length": 20}, tokenizer),
        ({"template_format": "alpaca"}, tokenizer),
        ({"loss_on": "all"}, tokenizer),
        ({"columns": {"instruction": "answer", "response": "question"}}, tokenizer),
        ({}, other),
        ({"validation_path": str(path)}, tokenizer),
    ]
    folder = path.parent / "cache"
    keep = {"pretokenize": True, "pretokenize_cache_dir": str(folder)}
    for number, (given, which) in enumerate(cases, 1):
        data = prepare_data(settings(path, **keep, **given), which, seed=0)
        assert not data.report.cached
        assert len(list(folder.iterdir())) == number
    moved = path.rename(path.with_name("moved.jsonl"))
    assert prepare_data(settings(moved, **keep), tokenizer, seed=7).report.cached
    moved.write_text(moved.read_text() + json.dumps(ROWS[0]) + "\n")
    assert not prepare_data(settings(moved, **keep), tokenizer, seed=7).report.cached


def test_a_cache_folder_that_cannot_be_is_refused(write, settings, tokenizer):
    path = write(ROWS)
    given = settings(path, pretokenize=True, pretokenize_cache_dir=str(path))
    with pytest.raises(ConfigError, match=r"pretokenize_cache_dir=.* cannot be created: "):
        prepare_data(given, tokenizer, seed=0)


def test_answers_of_gsm8k_are_learnt_to_the_last_token(shared, settings, tokenizer, tmp_path):
    small = tmp_path / "gsm8k.jsonl.gz"
    rows = [row.values for row in islice(read_rows(shared / "gsm8k_train.jsonl.gz"), 300)]
    small.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    data = prepare_data(settings(small, validation_split=0.0), tokenizer, seed=0)
    answers = [row["answer"] for row in rows]
    ends = tokenizer(answers, add_special_tokens=False)["input_ids"]
    assert (data.report.formats, data.report.train_rows) == (("question+answer",), 300)
    assert data.report.learnt_tokens == sum(len(ids) + 1 for ids in ends)


def test_the_instruction_items_in_the_tokens_of_gpt2(shared, settings):
    files = [shared.parent / "tok_gpt2" / name for name in ("vocab.json", "merges.txt")]
    core = ByteLevelBPETokenizer(*map(str, files))._tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    path = shared / "rasbt_instruct_1100.json"
    given = settings(path, template_format="alpaca", validation_split=0.0)
    report = prepare_data(given, tokenizer, seed=0).report
    outputs = [item["output"] for item in json.loads(path.read_text())]
    assert report.formats == ("instruction+input+output",)
    assert (report.rows_read, report.train_rows, dict(report.dropped)) == (1100, 1100, {})
    # In these tokens a line break never joins the word after it: responses stay what they are.
    ends = tokenizer(outputs)["input_ids"]
    assert report.learnt_tokens == sum(len(ids) + 1 for ids in ends)


@pytest.mark.parametrize("seed", range(5))
def test_every_sum_held_out_is_trained_on_in_another_wording(chat_tokenizer, seed):
    data = prepare_data(SftData(path="sums"), chat_tokenizer, seed=seed)
    trained, held = (
        [chat_tokenizer.decode(part.rows.row(n)[0]) for n in range(len(part.rows))]
        for part in (data.train, data.validation)
    )
    answers = {text.partition("assistant")[2] for text in trained}
    assert not set(held) & set(trained)
    assert all(text.partition("assistant")[2] in answers for text in held)
