import pytest


@pytest.fixture
def tiny(tmp_path):
    """A recipe that a step takes milliseconds of."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        "workload: lm\nsteps: 4\nbatch_size: 2\ndevice: cpu\n"
        "data: {length: 16, eval_windows: 2}\nmodel: {layers: 3, width: 16, heads: 2}\n"
        "optimizer: {lr: 0.01}\nprecision: {policy: fp16}\n"
    )
    return str(path)
