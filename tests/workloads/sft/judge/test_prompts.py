import json

import numpy as np
import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.formats import Conversation, Turn
from narrowcast.workloads.sft.data.prepare import prepare_data
from narrowcast.workloads.sft.data.settings import SftData
from narrowcast.workloads.sft.data.templates import select_template
from narrowcast.workloads.sft.data.tokenised import TokenRows
from narrowcast.workloads.sft.judge.prompts import (
    Ending,
    decode_answers,
    make_question,
    questions_from,
    response_ending,
    sample_questions,
)

ASKED = Conversation((Turn("user", "What is 2 + 2?"), Turn("assistant", "It is 4.")), "row 1")
TALK = Conversation(
    (
        Turn("system", "Be brief."),
        Turn("user", "a?"),
        Turn("assistant", "b."),
        Turn("user", "c?"),
        Turn("assistant", "d."),
    ),
    "row 2",
)
TEMPLATES = ["chat", "chatml", "alpaca", "basic"]


@pytest.mark.parametrize("conversation", [ASKED, TALK], ids=["asked", "talk"])
def test_a_chat_prompt_is_what_the_tokenizer_would_generate_from(tokenizer, conversation):
    question = make_question(conversation, select_template("chat", tokenizer))
    messages = [{"role": turn.role, "content": turn.text} for turn in conversation.turns[:-1]]
    wanted = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, tokenize=True
    )
    assert list(question.prompt) == list(wanted)
    assert question.reference == conversation.turns[-1].text


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("loss_on", ["response", "all"])
def test_a_prompt_is_what_training_reads_before_a_response(tokenizer, tmp_path, name, loss_on):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "What is 2 + 2?", "answer": "It is 4."}))
    settings = SftData(path=str(path), template_format=name, validation_split=0)
    rows = prepare_data(settings, tokenizer, seed=0).train.rows
    tokens, learnt = rows.row(0)
    template = select_template(name, tokenizer, loss_on=loss_on)
    (question,) = questions_from(path, template, most=5)
    assert list(question.prompt) == tokens[: int(np.argmax(learnt))].tolist()
    (shown,) = sample_questions(rows, tokenizer, count=4, room=None)
    assert shown[:2] == (question.prompt, "It is 4.")


def test_a_blank_before_a_response_is_the_models_to_write_where_training_lets_it(
    make_tokenizer, tmp_path
):
    tokenizer = make_tokenizer(merges=[("\u0120", "y"), ("\u0120", "t")])
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "Is it?", "answer": "yes"}))
    written = {"template_format": "basic", "instruction_template": "{instruction} {response}"}
    rows = prepare_data(SftData(path=str(path), validation_split=0, **written), tokenizer, seed=0)
    tokens, learnt = rows.train.rows.row(0)
    template = select_template("basic", tokenizer, instruction_template="{instruction} {response}")
    (question,) = questions_from(path, template, most=1)
    assert tokenizer.decode(question.prompt) == "Is it?"
    assert list(question.prompt) == tokens[: int(np.argmax(learnt))].tolist()


@pytest.mark.parametrize(
    ("name", "signs", "ending"),
    [
        ("chat", True, ("<|im_end|>", "")),
        ("chatml", True, ("<|im_end|>", "")),
        ("chatml", False, (None, "<|im_end|>")),
        ("alpaca", True, ("<eos>", "")),
        ("basic", True, ("<eos>", "")),
    ],
)
def test_a_response_ends_as_the_template_ends_it(make_tokenizer, tokenizer, name, signs, ending):
    own = tokenizer if signs else make_tokenizer(signs=False)
    token, text = ending
    wanted = Ending(token and own.convert_tokens_to_ids(token), text)
    assert response_ending(select_template(name, own)) == wanted


def test_words_after_a_response_end_it(tokenizer):
    text = "Q: {instruction}\nA: {response}\nEND"
    ending = response_ending(select_template("basic", tokenizer, instruction_template=text))
    assert ending == Ending(None, "END")
    answers = [tokenizer("four\nEND\nQ: and so on")["input_ids"], tokenizer(" five ")["input_ids"]]
    assert decode_answers(answers, tokenizer, ending) == ["four", "five"]


def test_rows_that_ask_nothing_are_refused_with_their_place(tmp_path, template):
    with pytest.raises(ConfigError, match="row 9 must end with an answer"):
        make_question(Conversation((Turn("text", "a story"),), "row 9"), template)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"line 1 has no known format, .*Name them question and"):
        questions_from(path, template, most=1)
    path.write_text('{"question": "\\ud800", "answer": "b"}')
    with pytest.raises(ConfigError, match=r"line 1: .* lone surrogate"):
        questions_from(path, template, most=1)


def test_as_many_questions_as_are_wanted_from_the_beginning(tmp_path, template):
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(9)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = questions_from(path, template, most=3)
    assert [question.reference for question in found] == ["0", "1", "2"]


def rows_of_marks(*marks):
    """Rows of tokens 0, 1, 2, …; # is learnt."""
    arrays = [
        (np.arange(len(each), dtype=np.int32), np.array([sign == "#" for sign in each]))
        for each in marks
    ]
    return TokenRows.joined(arrays)


@pytest.mark.parametrize(
    ("marks", "start"),
    [("..##", 2), (".##.##", 4), (".#######", 4), ("...#", 3)],
)
def test_a_sample_begins_where_the_last_response_does(tokenizer, marks, start):
    (found,) = sample_questions(rows_of_marks(marks), tokenizer, count=1, room=None)
    assert found.prompt == tuple(range(start))


def test_samples_are_from_all_over_the_rows_and_fit(tokenizer):
    rows = rows_of_marks(*("." * n + "##" for n in range(1, 11)))
    prompts = [len(q.prompt) for q in sample_questions(rows, tokenizer, count=3, room=None)]
    assert prompts == [1, 4, 7]
    assert [len(q.prompt) for q in sample_questions(rows, tokenizer, count=3, room=2)] == [1, 2]
    assert sample_questions(rows, tokenizer, count=3, room=0) == []
