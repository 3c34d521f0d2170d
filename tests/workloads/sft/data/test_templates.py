import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.formats import Conversation, Turn
from narrowcast.workloads.sft.data.templates import select_template

ASKED = (Turn("user", "Q?"), Turn("assistant", "A."))
TWICE = (*ASKED, Turn("user", "Why?"), Turn("assistant", "So."))


def of(*turns):
    return Conversation(turns, "f, line 7")


def pieces(name, turns, tokenizer, **how):
    written = select_template(name, tokenizer, **how).written(of(*turns))
    return [tuple(piece) for piece in written.pieces if piece.text]


def learnt(found):
    return [text for text, is_learnt in found if is_learnt]


def test_basic_is_the_instruction_template_and_the_end_is_learnt(tokenizer):
    assert pieces("basic", ASKED, tokenizer) == [
        ("### Instruction:\nQ?\n\n### Response:\n", False),
        ("A.<eos>", True),
    ]


def test_braces_in_a_text_stay_what_they_are(tokenizer):
    turns = (Turn("user", "{response} {0} {"), Turn("assistant", "{instruction}"))
    template = "<{instruction}|{response}>"
    found = pieces("basic", turns, tokenizer, instruction_template=template)
    assert found == [("<{response} {0} {|", False), ("{instruction}><eos>", True)]


def test_alpaca_sets_a_context_apart(tokenizer):
    turns = (Turn("user", "Q?", "C"), Turn("assistant", "A."))
    assert "".join(text for text, _ in pieces("alpaca", turns, tokenizer)) == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nQ?\n\n### Input:\nC\n\n### Response:\nA.<eos>"
    )


def test_chatml_learns_the_end_of_each_turn_and_of_all(tokenizer, make_tokenizer):
    found = pieces("chatml", (Turn("system", "S"), *TWICE), tokenizer)
    assert learnt(found) == ["A.<|im_end|>", "So.<|im_end|>", "\n<eos>"]
    ends = make_tokenizer(eos_token="<|im_end|>")
    assert pieces("chatml", ASKED, ends)[-1] == ("\n", False)


@pytest.mark.parametrize("name", ["basic", "alpaca"])
def test_every_response_of_several_ends(name, tokenizer):
    assert learnt(pieces(name, TWICE, tokenizer)) == ["A.<eos>", "So.<eos>"]


@pytest.mark.parametrize("name", ["basic", "alpaca"])
def test_templates_of_pairs_refuse_what_is_none(name, tokenizer):
    turns = (Turn("user", "a"), Turn("tool", "b"), Turn("assistant", "c"))
    with pytest.raises(
        ConfigError, match=f"line 7: template_format={name} .*got user, tool, assistant"
    ):
        pieces(name, turns, tokenizer)


def test_auto_is_chat_where_the_tokenizer_has_a_template(tokenizer, chat_tokenizer):
    assert select_template("auto", tokenizer).name == "basic"
    assert select_template("auto", chat_tokenizer).name == "chat"
    with pytest.raises(ConfigError, match=r"the tokenizer has none. Write data"):
        select_template("chat", tokenizer)


def test_a_text_is_learnt_as_it_stands_and_so_is_its_end(chat_tokenizer):
    assert pieces("chat", (Turn("text", "T"),), chat_tokenizer) == [("T<eos>", True)]


def test_chat_learns_what_follows_the_generation_prompt(untrimmed):
    assert learnt(pieces("chat", TWICE, untrimmed)) == ["A.<|im_end|>", "So.<|im_end|>"]


@pytest.mark.parametrize("loss_on", ["response", "all"])
def test_last_response_is_learnt_up_to_an_eos_that_does_not_end_turns(loss_on, chat_tokenizer):
    found = "".join(learnt(pieces("chat", TWICE, chat_tokenizer, loss_on=loss_on)))
    assert found.endswith("So.<|im_end|>\n<eos>")
    assert found.count("<eos>") == 1


TEMPLATES = {
    # What SmolLM2 has: a system's turn where there is none.
    "smollm": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        ["A.<|im_end|>", "So.<|im_end|>\n", "<eos>"],
    ),
    # Mistral and Llama 2: no words to ask for an answer with.
    "inst": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
        "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}",
        ["A.<eos>", "So.<eos>"],
    ),
    # Phi-3: an end that is there only while nothing follows.
    "phi": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] "
        "+ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        ["A.<|im_end|>", "So.<|im_end|>\n<eos>"],
    ),
    # No sign for an end: the tokenizer's comes after all.
    "plain": (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
        ["A.\n", "So.\n", "<eos>"],
    ),
    "trims": (
        "{% for message in messages %}{{ message['role'] + message['content'] | trim + eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}",
        ["A.<eos>", "So.<eos>"],
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_other_families_are_understood(name, make_tokenizer):
    template, expected = TEMPLATES[name]
    tokenizer = make_tokenizer(template=template)
    found = pieces("chat", TWICE, tokenizer)
    assert learnt(found) == expected
    messages = [{"role": turn.role, "content": turn.text} for turn in TWICE]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "".join(text for text, _ in found).removesuffix("<eos>") == rendered.removesuffix(
        "<eos>"
    )


FORGETS = (
    "{% for message in messages %}{{ message['role'] }}"
    "{% if message['role'] == 'user' or loop.last %}{{ message['content'] }}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_row(make_tokenizer):
    tokenizer = make_tokenizer(template=FORGETS)
    assert learnt(pieces("chat", ASKED, tokenizer)) == ["A.<eos>"]
    with pytest.raises(ConfigError, match=r"line 7, turn 2: .*chat template renders this response"):
        pieces("chat", TWICE, tokenizer)
    whole = pieces("chat", TWICE, tokenizer, loss_on="all")
    assert whole == [("userQ?<eos>assistant<eos>userWhy?<eos>assistantSo.<eos>", True)]


NO_SYSTEM = (
    "{% for message in messages if message['role'] != 'system' %}"
    "{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("loss_on", ["response", "all"])
def test_template_that_leaves_the_system_message_out_raises(loss_on, make_tokenizer):
    tokenizer = make_tokenizer(template=NO_SYSTEM)
    assert pieces("chat", ASKED, tokenizer, loss_on=loss_on)
    with pytest.raises(ConfigError, match=r"line 7: .*leaves the system message out, got 'Be kind"):
        pieces("chat", (Turn("system", "Be kind."), *ASKED), tokenizer, loss_on=loss_on)


def test_messages_that_a_template_strips_or_writes_as_json_are_not_left_out(make_tokenizer):
    template = (
        "{% for message in messages %}{% if message['role'] == 'tool' %}"
        "{{ message['content'] | tojson }}{% else %}{{ message['content'] | trim }}{% endif %}"
        "{{ eos_token }}{% endfor %}"
    )
    turns = (Turn("system", " S\n"), Turn("user", "Q?"), Turn("tool", 'a "b"\nc'), ASKED[1])
    assert pieces("chat", turns, make_tokenizer(template=template))


def test_a_template_that_fails_says_its_own_words(make_tokenizer):
    tokenizer = make_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        ConfigError, match=r"line 7: .*chat template fails: roles must alternate. Fix"
    ):
        pieces("chat", ASKED, tokenizer)


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ 1 + 'a' }}", "{{ messages[9].content }}", {"rag": "", "tool": ""}]
)
def test_a_template_that_is_broken_is_an_error_of_the_recipe(template, make_tokenizer):
    with pytest.raises(ConfigError, match="line 7: the tokenizer's chat template fails: "):
        pieces("chat", ASKED, make_tokenizer(template=template))


def test_a_template_that_writes_the_date_writes_the_same_tomorrow(make_tokenizer):
    today = "{{ strftime_now('%Y') + messages | map(attribute='content') | join + eos_token }}"
    found = pieces("chat", ASKED, make_tokenizer(template=today), loss_on="all")
    assert found == [("26 Jul 2024Q?A.<eos>", True)]


def test_a_tokenizer_without_an_end_is_refused(make_tokenizer):
    with pytest.raises(ConfigError, match="no eos token, so the model cannot learn where"):
        select_template("basic", make_tokenizer(eos_token=None))


def test_everything_is_learnt_where_that_is_asked_for(tokenizer):
    assert all(is_learnt for _, is_learnt in pieces("alpaca", TWICE, tokenizer, loss_on="all"))


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=20)
CONVERSATIONS = st.lists(st.tuples(WORDS, WORDS.filter(str.strip)), min_size=1, max_size=3)


@given(said=CONVERSATIONS, name=st.sampled_from(["basic", "alpaca", "chatml", "chat"]))
def test_what_is_learnt_is_the_responses_and_their_ends_in_order(chat_tokenizer, said, name):
    turns = [turn for q, a in said for turn in (Turn("user", q), Turn("assistant", a))]
    found = pieces(name, turns, chat_tokenizer)
    end = {"basic": "<eos>", "alpaca": "<eos>"}.get(name, "<|im_end|>")
    expected = "".join(a + end for _, a in said) + ("\n<eos>" if end == "<|im_end|>" else "")
    assert "".join(learnt(found)) == expected
