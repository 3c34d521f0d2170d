"""Settings as a recipe writes them: text bare, lists and mappings in YAML on one line."""

import re
from typing import Any

from narrowcast.runs import strict_json

_PLAIN = re.compile(
    r"(?!(?:true|false|null|yes|no|on|off|y|n)$)[a-z_][\w./-]*|[\d.]+%", re.IGNORECASE
)
"""Text that YAML reads as the same text without quotes."""


def written(result: Any) -> str:
    """Write the value of a setting so that a recipe or a command line takes it back."""
    return result if isinstance(result, str) else _flow(result)


def _flow(matched: Any) -> str:
    match matched:
        case str():
            return matched if _PLAIN.fullmatch(matched) else strict_json.dumps(matched)
        case list():
            # A resolved recipe spells out what an entry of a list, such as a phase, leaves out.
            inputs = [
                _requested_entry(item) if isinstance(item, dict) else item for item in matched
            ]
            return f"[{', '.join(map(_flow, inputs))}]"
        case dict():
            return "{" + ", ".join(f"{_flow(k)}: {_flow(v)}" for k, v in matched.items()) + "}"
        case _:
            return strict_json.dumps(matched)


def _requested_entry(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in entry.items() if x not in (None, {}, [])}
