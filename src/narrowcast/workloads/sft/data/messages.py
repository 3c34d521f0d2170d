"""Lists of messages, as `messages` (role, content) and as `conversations` (from, value)."""

from typing import Any

from narrowcast.config.problems import shortened
from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.conversation import Role, Turn

ROLES: dict[str, Role] = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "chatgpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
"""Who is meant; the second names are those of ShareGPT and of models that have others."""
CALLS = ("tool_calls", "function_call")


def parse_turns(messages: Any, location: str) -> tuple[Turn, ...]:
    """Return the turns of a list of messages, in their order."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(
            f"{location}: messages must be a list with at least one message, such as "
            f'[{{"role": "user", "content": ...}}].'
        )
    turns = tuple(_turn(each, f"{location}, message {n}") for n, each in enumerate(messages, 1))
    late = [turn for turn in turns[1:] if turn.role == "system"]
    if late:
        raise ConfigError(
            f"{location}: a system message must be the first message. Move it to the front, or "
            "remove it."
        )
    return turns


def _turn(message: Any, position: str) -> Turn:
    if not isinstance(message, dict):
        raise ConfigError(f"{position} must be an object with a role and a content.")
    keys = ("role", "content") if "role" in message else ("from", "value")
    if any(message.get(key) for key in CALLS):
        raise ConfigError(f"{position} has a tool call, which is not supported. Remove such rows.")
    who, said = (message.get(key) for key in keys)
    if not isinstance(who, str) or who.lower() not in ROLES:
        raise ConfigError(
            f"{position} must have role system, user, assistant or tool, got "
            f"{shortened(repr(who))}."
        )
    return Turn(ROLES[who.lower()], _content(said, position))


def _content(said: Any, location: str) -> str:
    match said:
        case None:
            return ""
        case str():
            return said
        case list():
            return "".join(_part(part, location) for part in said)
        case _:
            raise ConfigError(f"{location}: the content must be text, got {type(said).__name__}.")


def _part(part: Any, location: str) -> str:
    match part:
        case {"type": "text", "text": str() as text}:
            return text
        case _:
            raise ConfigError(
                f"{location}: every part of the content must be text. Other types are not "
                "supported."
            )
