import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from narrowcast.errors import ConfigError
from narrowcast.training.checkpoints import data_identity
from narrowcast.training.checkpoints.data_identity import fingerprint, identify_data


@dataclass
class Samples:
    """Data that is read sample by sample, as most people's is."""

    values: list
    read: int = 0

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.read += 1
        return self.values[index]


def looked_at(made, data, **parts):
    return identify_data(made.but(train_data=data, **parts).task)


def test_the_digest_of_an_array_is_that_of_its_bytes():
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    chunk = hashlib.sha256(array.tobytes()).digest()
    expected = hashlib.sha256(b"int16 (3, 4) " + chunk).hexdigest()
    assert fingerprint(array) == expected


def test_dtype_shape_order_and_place_count():
    array = np.arange(12, dtype=np.int16)
    others = [array.astype(np.int32), array.reshape(3, 4), array[::-1], array + 1]
    assert len({fingerprint(each) for each in (array, *others)}) == 5
    assert fingerprint(array, array) != fingerprint(np.concatenate([array, array]))
    assert fingerprint(array.reshape(3, 4).T) == fingerprint(array.reshape(3, 4).T.copy())


@given(st.integers(1, 4), st.integers(0, 40), st.integers(0, 39), st.integers(1, 255))
def test_any_changed_byte_changes_it_whatever_the_chunks(chunk, size, place, change):
    before = data_identity.CHUNK
    data_identity.CHUNK = chunk
    try:
        array = np.arange(size, dtype=np.uint8)
        changed = array.copy()
        if size:
            changed[place % size] ^= change
        assert (fingerprint(array) == fingerprint(changed)) is (size == 0)
    finally:
        data_identity.CHUNK = before


def test_tensors_of_16_bits_have_one():
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool):
        assert fingerprint(torch.zeros(3).to(dtype)) != fingerprint(torch.ones(3).to(dtype))


def test_data_in_memory_is_looked_at_as_a_whole(ready):
    values = torch.randn(1000, 3)
    changed = values.clone()
    changed[501, 1] += 1
    one, other = (looked_at(ready(), TensorDataset(each)) for each in (values, changed))
    assert one.looked_at == "all of it"
    assert "1000 samples, but with other values" in other.differs_from(one.to_json())
    assert one.differs_from(one.to_json()) == ""


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        {"text": "a", "ids": [1, 2]},
        ("a", np.float32(1)),
        b"bytes",
        np.array(["x", None], dtype=object),
    ],
)
def test_samples_of_any_shape_are_looked_at_first_and_last_among_them(ready, value):
    same = Samples([value] * 500)
    last = Samples([*[value] * 499, {"another": 1}])
    before = looked_at(ready(), same)
    assert before.looked_at == "64 samples spread over it"
    assert same.read == 64 + 4  # the first ones again
    assert before.differs_from(looked_at(ready(), Samples([value] * 500)).to_json()) == ""
    assert "other values" in before.differs_from(looked_at(ready(), last).to_json())


def test_pictures_are_looked_at(ready):
    image = pytest.importorskip("PIL.Image")
    black, white = image.new("L", (4, 4), 0), image.new("L", (4, 4), 255)
    one, other = looked_at(ready(), Samples([black] * 9)), looked_at(ready(), Samples([white] * 9))
    assert one.digest
    assert one.digest != other.digest


@pytest.mark.parametrize(
    "value",
    [
        object(),
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["object", "sparse", "nested"],
)
def test_samples_that_cannot_be_told_apart_are_said_to_be(ready, value):
    found = looked_at(ready(), Samples([value] * 9))
    assert (found.digest, found.looked_at) == ("", "nothing")
    assert found.differs_from(found.to_json()) == ""


def test_samples_that_draw_at_random_are_the_same_and_draw_nothing_from_the_run(ready):
    class Noisy(Samples):
        def __getitem__(self, index):
            return torch.rand(3) + np.random.rand()  # as augmentations do

    made = ready()
    state = torch.get_rng_state()
    one = looked_at(made, Noisy([0] * 9))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert one == looked_at(made, Noisy([0] * 9))


def test_samples_made_anew_each_time_are_no_mark_of_the_data(ready):
    class Anew(Samples):
        def __getitem__(self, index):
            return np.random.default_rng().normal(size=3)

    found = looked_at(ready(), Anew([0] * 99))
    assert (found.samples, found.digest, found.looked_at) == (99, "", "nothing")


@pytest.mark.parametrize("kind", [Samples, torch.utils.data.TensorDataset])
def test_a_look_by_a_worker_is_the_same_look(ready, kind):
    values = torch.randn(90, 3)
    data = Samples(list(values)) if kind is Samples else TensorDataset(values)
    task = ready().but(train_data=data).task
    assert identify_data(task) == identify_data(task, workers=2)


def test_files_that_samples_open_are_not_opened_for_the_workers(ready, tmp_path):
    """One opened before workers fork would have one place for all of them, and give wrong bytes."""
    path = tmp_path / "samples"
    path.write_bytes(np.arange(100, dtype=np.float32).tobytes())

    class Lazy:
        file = None

        def __len__(self):
            return 100

        def __getitem__(self, index):
            self.file = self.file or path.open("rb", buffering=0)
            self.file.seek(4 * index)
            return np.frombuffer(self.file.read(4), dtype=np.float32).copy()

    data = Lazy()
    assert identify_data(ready().but(train_data=data).task, workers=2).digest
    assert data.file is None


def test_a_task_that_says_nothing_of_its_data_is_told(ready):
    with pytest.raises(ConfigError, match="for other data, got ''"):
        looked_at(ready(), Samples([1] * 9), data_digest=lambda: "")
