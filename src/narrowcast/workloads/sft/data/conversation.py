"""A conversation, whatever its row looked like: turns in order, each of somebody."""

from typing import Literal, NamedTuple

Role = Literal["system", "user", "assistant", "tool", "text"]
"""Who speaks; `text` is nobody: a text to learn as it stands."""


class Turn(NamedTuple):
    """What one says."""

    role: Role
    text: str
    context: str = ""
    """Material that a user's text is about; some templates set it apart."""

    @property
    def whole(self) -> str:
        """The text and, after a blank line, its context."""
        return f"{self.text}\n\n{self.context}" if self.context else self.text


class Conversation(NamedTuple):
    """Turns in their order, and where they were found."""

    turns: tuple[Turn, ...]
    location: str
    """The file and line, or the row, as messages name it."""

    @property
    def is_text(self) -> bool:
        """It is a text to learn as it stands, without roles."""
        return self.turns[0].role == "text"
