"""The settings of a recipe for Roman numerals."""

from pydantic import Field

from narrowcast.config.sections import DataSection, Section, Sections


class NumeralModel(Section):
    """The shape of the network."""

    width: int = Field(default=32, ge=8, le=2**16, description="embedding width of a letter")


class Objective(Section):
    """The second loss: the size of the number."""

    size: float = Field(default=0.1, ge=0, le=1e6, description="weight of the second loss")


SECTIONS = Sections(data=DataSection, model=NumeralModel, objective=Objective)
