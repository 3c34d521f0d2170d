from pathlib import Path

import pytest

from narrowcast.runs import RunFolder


@pytest.fixture
def create(tmp_path: Path):
    """Make the folder of a small run."""

    def create(path: str | Path = "run") -> RunFolder:
        return RunFolder.create(
            tmp_path / path,
            recipe_text="workload: toy\r\n# as given\n",
            resolved={"steps": {"value": 3, "origin": "default"}},
            environment={"python": "3.11"},
        )

    return create
