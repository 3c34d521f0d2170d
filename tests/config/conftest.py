from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import Field

from narrowcast.config import DataSection, LoadedRecipe, Section, Sections, load_recipe
from narrowcast.errors import ConfigError

ENOUGH = "workload: toy\nsteps: 100\nbatch_size: 4\n"


class ToyData(DataSection):
    text: Path | None = Field(default=None, description="file to read")
    length: int = Field(default=128, ge=1, description="tokens per sample")
    files: str | list[str] = Field(default="a.txt", description="several files")
    held_out: float = Field(default=0.1, gt=0, lt=1, description="share not trained on")


class ToyHead(Section):
    tied: bool = Field(default=True, description="the head is the embedding")


class ToyModel(Section):
    width: int = Field(default=64, ge=1, description="width")
    sizes: list[int] = Field(default=[1, 2], description="sizes")
    head: ToyHead = Field(default_factory=ToyHead, description="the head")


def toy_sections(workload: str) -> Sections:
    if workload != "toy":
        raise ConfigError(f"no such workload; did you mean toy? got {workload}")
    return Sections(data=ToyData, model=ToyModel)


@pytest.fixture
def sections() -> Callable[[str], Sections]:
    return toy_sections


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., LoadedRecipe]:
    """Load a recipe that has what it must have, `more` lines and `words` on top."""

    def load(*words: str, more: str = "", text: str | bytes = ENOUGH) -> LoadedRecipe:
        path = tmp_path / "quick.yaml"
        content = text if isinstance(text, bytes) else (text + more).encode()
        path.write_bytes(content)
        return load_recipe(path, words, sections=toy_sections)

    return load


@pytest.fixture
def refusal(load: Callable[..., LoadedRecipe]) -> Callable[..., str]:
    """Return the message with which a recipe is refused."""

    def refusal(*words: str, **given: str | bytes) -> str:
        with pytest.raises(ConfigError) as caught:
            load(*words, **given)
        return str(caught.value)

    return refusal
