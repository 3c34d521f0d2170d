import pytest

TINY = """\
workload: lm
steps: 4
batch_size: 2
device: cpu
data: {length: 16, eval_windows: 2}
model: {layers: 1, width: 16, heads: 2}
optimizer: {lr: 0.01}
"""


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """Several workers share the cores, and a tiny model is no slower."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def tiny(tmp_path):
    """A recipe that a step takes milliseconds of."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)
