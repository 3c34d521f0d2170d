import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from narrowcast.workloads.sft.data.settings import SftData

CORPUS = [
    "### Instruction:\nWhat is the capital of France?\n\n### Response:\nThe capital is Paris.",
    "<|user|>\nhello there, how are you?\n\n  indented\n\n\nthree lines é ü 日本",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHARED = next(
    (up / "shared/data/sft" for up in Path(__file__).parents if (up / "shared/data/sft").is_dir()),
    None,
)


def make_tokenizer(*, template=None, bos=False, trim=True, **named):
    """A byte-level BPE with a few merges, some of them across line breaks."""
    core = Tokenizer(models.BPE())
    # Without a regular expression, so that merges go across words and lines.
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trim)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>", "<s>", "<|im_start|>", "<|im_end|>", "<pad>"],
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    named = {"eos_token": "<eos>", **named}
    extra = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, chat_template=template, bos_token="<s>", **extra, **named
    )


@pytest.fixture(scope="session", name="make_tokenizer")
def make():
    return make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer():
    return make_tokenizer(template=CHATML)


@pytest.fixture(scope="session")
def untrimmed():
    """One whose spans hold the spaces before words."""
    return make_tokenizer(template=CHATML, trim=False, eos_token="<|im_end|>")


@pytest.fixture
def write(tmp_path):
    """Write rows, one a line, and return the path."""

    def written(rows, name="rows.jsonl"):
        path = tmp_path / name
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return written


@pytest.fixture
def settings():
    """Return the section, with a path."""
    return lambda path="x.jsonl", **given: SftData(path=str(path), **given)


@pytest.fixture(scope="session")
def shared():
    if SHARED is None:
        pytest.skip("needs GSM8K and instruction items in ../shared/data/sft")
    return SHARED
