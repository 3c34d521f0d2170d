from pathlib import Path

import pytest

TINY = """\
workload: lm
description: as small as it gets
steps: 4
batch_size: 2
device: cpu
data: {length: 16, eval_windows: 2}
model: {layers: 3, width: 16, heads: 2}
optimizer: {lr: 0.01}
precision: {policy: fp16}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A recipe that a step takes milliseconds of."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return str(path)
