"""The task: predict the last digit of a number from its Roman numeral."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.config.sections import Recipe
from narrowcast.precision.step.prepared import Prepared
from narrowcast.runs import Metric, TaskInfo
from narrowcast.training.task import LossParts, Task
from narrowcast.workloads.tutorial.roman import roman
from narrowcast.workloads.tutorial.settings import NumeralModel, Objective

ACCURACY = Metric(name="accuracy", better="higher", text=".1%")
INFO = TaskInfo(unit="numeral", metrics=(ACCURACY,), loss_parts=("digit", "size"))
HELD_OUT = range(7, 4000, 7)
TRAINED = [number for number in range(1, 4000) if number not in HELD_OUT]
LETTERS, LONGEST = " IVXLCDM", 15


def collate(numbers: list[int]) -> dict[str, Tensor]:
    """Pad numerals, which have 1 to 15 letters, on the left."""
    letters = [[LETTERS.index(each) for each in roman(n).rjust(LONGEST)] for n in numbers]
    return {"letters": torch.tensor(letters), "number": torch.tensor(numbers)}


class Reader(nn.Module):
    """An MLP from letters to ten digit logits and a size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        self.hidden = nn.Linear(LONGEST * width, 4 * width)
        self.digit, self.size = nn.Linear(4 * width, 10), nn.Linear(4 * width, 1)

    def forward(self, letters: Tensor) -> tuple[Tensor, Tensor]:
        x = F.gelu(self.hidden(self.embed(letters).flatten(1)))
        return self.digit(x).float(), self.size(x).float().squeeze(1)


def build_task(recipe: Recipe, *, device: torch.device) -> Task:
    """Return the task; on the meta device only the shapes of the model matter."""
    with torch.random.fork_rng([]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.manual_seed(recipe.seed)
        model = Reader(recipe.section(NumeralModel).width).to(device)
    weight, held_out = recipe.section(Objective).size, collate(list(HELD_OUT))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> LossParts:
        digits, sizes = model(batch["letters"])
        digit = F.cross_entropy(digits, batch["number"] % 10)
        size = F.mse_loss(sizes, batch["number"].float().log10())
        return LossParts(total=digit + weight * size, parts={"digit": digit, "size": size})

    def is_right(model: nn.Module) -> Tensor:
        digits = model(held_out["letters"].to(device))[0].argmax(1).cpu()
        return torch.eq(digits, held_out["number"] % 10)

    def write_results(folder: Path, prepared: Prepared) -> None:
        with torch.no_grad(), prepared.autocast():
            wrong = held_out["number"][~is_right(prepared.model)].tolist()
        (folder / "misread.json").write_text(json.dumps([roman(number) for number in wrong]))

    return Task(
        model=model,
        train_data=TRAINED,
        collate=collate,
        loss=loss,
        evaluate=lambda model: {"accuracy": is_right(model).double().mean().item()},
        items=lambda batch: len(batch["number"]),
        gemm_rows=recipe.batch_size,
        info=INFO,
        write_results=write_results,
    )
