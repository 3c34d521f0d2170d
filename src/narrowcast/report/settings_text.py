"""Settings as a recipe writes them: text bare, lists and mappings in YAML on one line."""

import re
from typing import Any

from narrowcast.runs import strict_json

_PLAIN = re.compile(
    r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[a-z_][\w./-]*|[\d.]+%", re.IGNORECASE
)
"""Text that YAML reads as the same text without quotes."""


def written(found: Any) -> str:
    """Write the value of a setting so that a recipe or a command line takes it back."""
    return found if isinstance(found, str) else _flow(found)


def _flow(found: Any) -> str:
    match found:
        case str():
            return found if _PLAIN.fullmatch(found) else strict_json.dumps(found)
        case list():
            # A resolved recipe spells out what an entry of a list, such as a phase, leaves out.
            given = [_given(item) if isinstance(item, dict) else item for item in found]
            return f"[{', '.join(map(_flow, given))}]"
        case dict():
            return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in found.items()) + "}"
        case _:
            return strict_json.dumps(found)


def _given(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in entry.items() if x not in (None, {}, [])}
