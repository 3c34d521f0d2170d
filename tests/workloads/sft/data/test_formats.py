from typing import get_args

import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.formats import FORMATS, Conversations, Turn, detected
from narrowcast.workloads.sft.data.preferences import PAIRED
from narrowcast.workloads.sft.data.prepare import prepare_data
from narrowcast.workloads.sft.data.settings import Columns, FormatChoice, SftData
from narrowcast.workloads.sft.data.sources import Row
from narrowcast.workloads.sft.models.loading import tiny_tokenizer


def read(*rows, choice="auto", **columns):
    placed = [Row(values, f"f, line {number}") for number, values in enumerate(rows, 1)]
    return Conversations(placed, choice, Columns(**columns))


def turns(*rows, **how):
    """Role, text and context of each turn."""
    return [[turn[:3] for turn in each.turns] for each in read(*rows, **how)]


ASKED = [("user", "Q", ""), ("assistant", "A", "")]
GIVEN = [("user", "Q", "C"), ("assistant", "A", "")]
TABLE = [
    ({"instruction": "Q", "input": "C", "output": "A"}, GIVEN),
    ({"instruction": "Q", "input": "", "output": "A"}, ASKED),
    ({"instruction": "Q", "input": None, "output": "A", "id": 3}, ASKED),
    ({"input": "Q", "output": "A"}, ASKED),
    ({"instruction": "Q", "context": "C", "response": "A"}, GIVEN),
    ({"message_1": "Q", "message_2": "A", "sub_topic": "s", "topic": "t"}, ASKED),
    ({"message_1": "Q", "message_2": "A"}, ASKED),
    ({"assistant": "A", "system": "S", "user": "Q"}, [("system", "S", ""), *ASKED]),
    ({"assistant": "A", "system": " ", "user": "Q"}, ASKED),
    ({"prompt": "Q", "completion": "A"}, ASKED),
    ({"prompt": "Q", "response": "A"}, ASKED),
    ({"question": "Q", "answer": "A"}, ASKED),
    ({"question": "Q", "answer": 42}, [("user", "Q", ""), ("assistant", "42", "")]),
    ({"question": "Q", "response": "A"}, ASKED),
    ({"context": "Q", "response": "A"}, ASKED),
    ({"Context": "Q", "Response": "A"}, ASKED),
    ({"instruction": "Q", "response": "A"}, ASKED),
    ({"instruction": "Q", "output": "A"}, ASKED),
    ({"context": "C", "question": "Q", "answer": "A"}, GIVEN),
    ({"text": "T"}, [("text", "T", "")]),
    ({"question": "Q", "answer": "A", "text": "QA"}, ASKED),
]


@pytest.mark.parametrize(("row", "expected"), TABLE)
def test_a_row_of_each_known_format_becomes_the_same_turns(row, expected):
    assert turns(row) == [expected]


def test_every_format_can_be_found_and_can_be_asked_for():
    assert [detected(form.keys) for form in FORMATS] == list(FORMATS)
    names = {form.name for form in (*FORMATS, *PAIRED)}
    assert {"auto", "infer", *names} == set(get_args(FormatChoice))


def test_messages_keep_their_order_over_many_turns():
    said = ["system", "user", "assistant", "user", "tool", "assistant"]
    row = {"messages": [{"role": role, "content": f"{n}"} for n, role in enumerate(said)]}
    assert turns(row) == [[(role, f"{n}", "") for n, role in enumerate(said)]]


def test_sharegpt_conversations_are_messages_by_other_names():
    said = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    assert turns({"conversations": said}) == [ASKED]


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "Q"}, {"type": "text", "text": "!"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A"}]}
    assert turns(row)[0][0] == ("user", "Q!", "")


USER = {"role": "user", "content": "Q"}
BAD = [
    ({"messages": []}, "line 1: messages must be a list with"),
    ({"messages": ["Q"]}, "line 1, message 1 must be an object"),
    ({"messages": [{"role": "king", "content": "Q"}]}, "message 1 must have role .* got 'king'"),
    ({"messages": [USER, {"role": "system", "content": "S"}]}, "system message must be the first"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "message 1 has a tool call"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "part of the content must be text",
    ),
    ({"messages": [{"role": "user", "content": 3}]}, "content must be text, got int"),
    ({"question": "Q", "answer": ["A"]}, "line 1: answer must be text, got list"),
    ({"a": "Q", "b": "A"}, "line 1 has no known format, got the columns a, b. Write data.c"),
]


@pytest.mark.parametrize(("row", "said"), BAD)
def test_what_is_no_conversation_is_refused_with_its_row(row, said):
    with pytest.raises(ConfigError, match=said):
        turns(row)


def test_the_first_row_of_another_format_is_named():
    rows = [{"question": "Q", "answer": "A"}] * 2 + [{"prompt": "Q", "completion": "A"}]
    with pytest.raises(ConfigError, match=r"line 3 reads as prompt\+completion, but the rows bef"):
        turns(*rows)


def test_a_row_that_would_lose_its_context_is_of_another_format():
    rows = [{"instruction": "Q", "output": "A"}, {"instruction": "Q", "input": "C", "output": "A"}]
    with pytest.raises(ConfigError, match="line 2 reads as instruction"):
        turns(*rows)
    assert turns(*rows, choice="instruction+input+output") == [ASKED, GIVEN]


def test_a_format_that_is_asked_for_needs_its_columns():
    with pytest.raises(ConfigError, match="line 1 has no column answer, got question, text"):
        turns({"question": "Q", "text": "T"}, choice="question+answer")


def test_columns_can_be_named():
    row = {"q": "Q", "a": "A", "more": "C", "who": "S", "text": "no"}
    named = {"instruction": "q", "response": "a", "context": "more", "system": "who"}
    assert turns(row, **named) == [[("system", "S", ""), *GIVEN]]


def test_a_column_that_is_not_there_is_refused_even_if_it_could_be_left_out():
    with pytest.raises(ConfigError, match=r"line 1 has no column more, got q, a"):
        turns({"q": "Q", "a": "A"}, instruction="q", response="a", context="more")


def test_names_are_guessed_at_only_where_that_is_asked_for():
    row = {"my_question": "Q", "best_answer": "A", "url": "u"}
    with pytest.raises(ConfigError, match=r"or data.format=infer"):
        turns(row)
    found = read(row, choice="infer")
    assert [each.turns for each in found] == [(Turn("user", "Q"), Turn("assistant", "A"))]
    assert found.format.name == "inferred my_question+best_answer"


def test_a_guess_between_two_is_refused():
    with pytest.raises(ConfigError, match=r"answer_1, answer_2 look like a response, among"):
        turns({"query": "Q", "answer_1": "A", "answer_2": "B"}, choice="infer")


@pytest.mark.parametrize("sign", [";", "\t"])
def test_a_table_with_other_signs_than_commas_is_told_so(sign, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt{sign}completion\na{sign}b\n")
    with pytest.raises(ConfigError, match=r"one column, .* as its separator. Save the .csv with"):
        prepare_data(SftData(path=str(path)), tiny_tokenizer(), seed=0)
