"""Loss masks of chat templates, with and without `{% generation %}`, against transformers' own."""

import json
import re

import numpy as np
import pytest

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.formats import Conversations
from narrowcast.workloads.sft.data.settings import Columns, SftData
from narrowcast.workloads.sft.data.sources import Row
from narrowcast.workloads.sft.data.templates import select_template
from narrowcast.workloads.sft.data.tokenised import Encoder, Tally

# Written as that of Qwen2.5, shortened; with the marks that TRL adds to it for training.
TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}"
    "{%- generation %}{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for tool_call in message.tool_calls %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' ~ tool_call.function.name ~ \'", "arguments": \' }}'
    "{{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{{- '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
PLAIN = re.sub(r"{%-? (end)?generation %}", "", TOOLS)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Paris"}}}  # fmt: skip
ASK = {"role": "user", "content": "Is it hot in Paris?"}
ANSWER = {"role": "assistant", "content": "Yes, 35 degrees."}
CALLED = [
    ASK,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "35"},
    ANSWER,
]
LONGER = [{"role": "system", "content": "Be kind."}, ASK, ANSWER, ASK, ANSWER]


def row_of(tokenizer, values, **settings):
    """Return tokens and loss mask of a row."""
    data = SftData(path="x.jsonl", **settings)
    template = select_template(data.template_format, tokenizer)
    read = Conversations([Row(values, "f, line 7")], "auto", Columns())
    ((tokens, learnt),) = Encoder.of(template, data).rows(read, Tally())
    return tokens.tolist(), learnt.astype(int).tolist()


def theirs(tokenizer, messages, tools=None):
    result = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(result["input_ids"]), list(result["assistant_masks"])


@pytest.mark.parametrize("template", [TOOLS, PLAIN], ids=["marked", "plain"])
@pytest.mark.parametrize(
    ("messages", "tools"), [(CALLED, [WEATHER]), (CALLED[:2], [WEATHER]), (LONGER, None)]
)
def test_masks_are_those_of_transformers(template, messages, tools, make_tokenizer):
    end = {"eos_token": "<|im_end|>"}
    values = {"messages": messages} | ({"tools": tools} if tools else {})
    ours = row_of(make_tokenizer(template=template, **end), values)
    expected = theirs(make_tokenizer(template=TOOLS, **end), messages, tools)
    assert ours == expected
    assert 0 < np.mean(ours[1]) < 1


def test_an_eos_token_follows_if_the_template_writes_none(make_tokenizer):
    tokenizer = make_tokenizer(template=TOOLS)
    tokens, learnt = row_of(tokenizer, {"messages": LONGER})
    expected, mask = theirs(tokenizer, LONGER)
    assert tokens == [*expected, tokenizer.eos_token_id]
    assert learnt == [*mask[:-1], 1, 1]  # with the line break before it


def test_arguments_as_text_and_old_function_calls_are_the_same_call(make_tokenizer):
    tokenizer = make_tokenizer(template=TOOLS)
    as_text = {**CALL, "function": {"name": "weather", "arguments": json.dumps({"city": "Paris"})}}
    old = {"role": "assistant", "content": None, "function_call": as_text["function"]}
    forms = (CALLED[1], {**CALLED[1], "tool_calls": [as_text]}, old)
    rows = [row_of(tokenizer, {"messages": [ASK, each], "tools": [WEATHER]}) for each in forms]
    rows.append(row_of(tokenizer, {"messages": CALLED[:2], "tools": json.dumps([WEATHER])}))
    assert all(row == rows[0] for row in rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tool_calls": [{"function": {"name": "f", "arguments": "["}}]}, "arguments as a JSON"),
        ({"tool_calls": [{"function": {"arguments": {}}}]}, "function with a name"),
        ({"role": "user", "tool_calls": [CALL]}, "only the assistant calls tools"),
    ],
)
def test_a_call_that_cannot_be_rendered_raises(change, message, make_tokenizer):
    with pytest.raises(ConfigError, match=message):
        row_of(make_tokenizer(template=TOOLS), {"messages": [ASK, {**CALLED[1], **change}]})


def test_tools_that_a_template_leaves_out_raise(make_tokenizer):
    silent = "{% for m in messages %}{{ m.role + m.content + eos_token }}{% endfor %}"
    with pytest.raises(ConfigError, match="leaves the tool weather out"):
        row_of(make_tokenizer(template=silent), {"messages": CALLED})
    with pytest.raises(ConfigError, match=r"Write data\.template_format=chat"):
        row_of(make_tokenizer(), {"messages": CALLED}, template_format="chatml")
    with pytest.raises(ConfigError, match="tools must be a list"):
        row_of(make_tokenizer(template=TOOLS), {"messages": CALLED, "tools": "no"})
