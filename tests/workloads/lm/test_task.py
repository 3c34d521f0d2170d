import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from narrowcast.errors import ConfigError
from narrowcast.workloads import build_task, load_recipe
from narrowcast.workloads.lm.task import LanguageModel, build_language_model

CPU = torch.device("cpu")
SMALL = ["model.layers=1", "model.width=16", "model.heads=2", "data.length=16", "batch_size=3"]


def task_of(*words: str, device: torch.device = CPU) -> LanguageModel:
    return build_language_model(load_recipe("quickstart", [*SMALL, *words]).recipe, device=device)


def summed_nats(task: LanguageModel, windows: list[int]) -> tuple[float, np.ndarray]:
    """Compute the loss in float64, one window at a time, from the definition."""
    model, nats, seen = task.model.double(), 0.0, []
    for window in windows:
        inputs, targets = task.validation_data.__getitems__([window])
        with torch.no_grad():
            logits = model(inputs)[0]
        chosen = logits[torch.arange(len(targets[0])), targets[0]]
        nats += (logits.exp().sum(-1).log() - chosen).sum().item()
        seen.append(targets.numpy().ravel())
    model.float()
    return nats, np.concatenate(seen)


def test_a_language_model_is_a_task_of_the_engine():
    task = build_task(load_recipe("quickstart", SMALL).recipe, device=CPU)
    batch = task.train_data.__getitems__([0, 5, 7])
    assert task.loss(task.model, batch).shape == ()
    assert task.items(batch) == 3 * 16


def test_the_loss_is_the_cross_entropy_float64_gives():
    task = task_of()
    inputs, targets = task.train_data.__getitems__([0, 5, 7])
    loss = task.loss(task.model, (inputs, targets)).item()
    exact = F.cross_entropy(task.model.double()(inputs).flatten(0, 1), targets.flatten()).item()
    # 256 exponentials are added up, each of a logit that is a sum of 16 terms.
    assert loss == pytest.approx(exact, rel=256 * 2.0**-24)


def test_the_loss_of_16_bit_logits_is_taken_in_fp32():
    task = task_of("model.tied=false")
    batch = task.train_data.__getitems__([0])
    # The head's own cast stands for a region of 16 bits, which not every CPU multiplies in.
    task.model.head.register_forward_hook(lambda module, inputs, logits: logits.bfloat16())
    logits = task.model(batch[0])[0]
    assert logits.dtype == torch.bfloat16
    assert torch.equal(task.loss(task.model, batch), F.cross_entropy(logits.float(), batch[1][0]))


def test_evaluation_counts_every_token_alike():
    # 7 windows in batches of 3: the last batch has one window.
    task = task_of("data.eval_windows=7")
    available = len(task.validation_data)
    chosen = [n * available // 7 for n in range(7)]
    metrics = task.evaluate(task.model)
    nats, seen = summed_nats(task, chosen)
    assert len(seen) == 7 * 16
    assert list(metrics) == ["loss", "perplexity", "bits_per_byte"]
    assert metrics["loss"] == pytest.approx(nats / len(seen), rel=256 * 2.0**-24)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert metrics["bits_per_byte"] == pytest.approx(metrics["loss"] / math.log(2))


def test_the_parts_of_held_out_text_are_what_an_evaluation_looks_at():
    task = task_of("data.eval_windows=7")
    held = task.task().held_out
    assert held.parts == 3
    with torch.no_grad():
        first, second, third = (held.headline(task.model, part).item() for part in range(3))
    # By windows: the last part has one.
    mean = (3 * first + 3 * second + third) / 7
    assert mean == pytest.approx(task.evaluate(task.model)["loss"], rel=256 * 2.0**-24)


def test_bits_a_byte_count_the_bytes_behind_each_token():
    task = task_of("data.tokenizer=bpe", "model.vocab=500", "data.eval_windows=4")
    available = len(task.validation_data)
    metrics = task.evaluate(task.model)
    nats, seen = summed_nats(task, [n * available // 4 for n in range(4)])
    size = sum(len(task.tokenizer.decode([token]).encode()) for token in seen.tolist())
    assert size > 1.5 * len(seen)
    assert metrics["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=256 * 2.0**-24)


def test_few_validation_windows_are_all_taken():
    task = task_of("data.eval_windows=1000000")
    everything = sum(targets.shape[0] for _, targets in task._validation_batches())
    assert everything == len(task.validation_data)


def test_evaluation_leaves_no_gradient_and_every_mode_as_it_was():
    task = task_of()
    task.model.norm.eval()
    before = [module.training for module in task.model.modules()]
    first, again = task.evaluate(task.model), task.evaluate(task.model)
    assert first == again
    assert [module.training for module in task.model.modules()] == before
    assert all(parameter.grad is None for parameter in task.model.parameters())


def test_a_hopeless_model_has_an_infinite_perplexity_and_no_error():
    task = task_of("model.tied=false", "data.eval_windows=1")
    with torch.no_grad():
        task.model.head.weight.mul_(1e6)
    assert task.evaluate(task.model)["perplexity"] == math.inf


def test_synthetic_tokens_fill_the_vocabulary_and_stand_for_no_bytes():
    task = task_of("data.text=synthetic", "model.vocab=1000", "data.eval_windows=2")
    inputs, _ = task.train_data.__getitems__(list(range(1000)))
    assert 990 < inputs.max() < 1000
    assert list(task.evaluate(task.model)) == ["loss", "perplexity"]


def test_text_comes_from_the_files_named(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 100)
    task = task_of(f"data.text={tmp_path}/a.txt")
    inputs, _ = task.train_data.__getitems__(list(range(len(task.train_data))))
    assert set(task.tokenizer.decode(inputs.flatten().tolist())) == set("0123456789")


def test_a_trained_tokenizer_never_sees_the_validation_text(tmp_path):
    # Of each tenth, 90 characters of training text and 10 of validation text.
    (tmp_path / "a.txt").write_text((" abab" * 18 + " zqzq" * 2) * 10)
    task = task_of(f"data.text={tmp_path}/a.txt", "data.tokenizer=bpe", "data.length=3")
    assert len(task.tokenizer.encode(" abab")) == 1
    assert len(task.tokenizer.encode(" zqzq")) == 5


def test_on_the_meta_device_no_text_is_read_and_nothing_is_allocated():
    task = task_of("data.text=/no/such/file.txt", device=torch.device("meta"))
    assert {tensor.device.type for tensor in task.model.parameters()} == {"meta"}
    assert len(task.train_data) == 0


def test_a_text_shorter_than_a_window_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(ConfigError, match=r"90 training and 10 .*data.length=9"):
        task_of(f"data.text={tmp_path}/a.txt")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_fewer_tokens_than_there_are_bytes_are_refused(tokenizer):
    with pytest.raises(
        ConfigError, match=r"model.vocab must be at least 256 .*got 255. Write model.vocab=256"
    ):
        task_of("model.vocab=255", f"data.tokenizer={tokenizer}")


def test_a_missing_tokenizer_is_refused():
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be bytes, bpe, or a folder"):
        task_of("data.tokenizer=byte")


def test_a_hundred_steps_of_a_small_model_know_more_than_the_frequency_of_bytes():
    task = task_of("model.width=32", "data.length=32")
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.01)
    for step in range(100):
        windows = range(step * 8, (step + 1) * 8)
        optimizer.zero_grad()
        task.loss(task.model, task.train_data.__getitems__(list(windows))).backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step()
    counts = Counter(task.train_data.tokens.tolist())
    shares = [count / counts.total() for count in counts.values()]
    entropy = -sum(share * math.log(share) for share in shares)
    assert task.evaluate(task.model)["loss"] < entropy
