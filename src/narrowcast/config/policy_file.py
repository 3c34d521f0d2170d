"""A policy in a file: `precision.policy=@policy.yaml` reads it.

The file has the policy under `policy` and exceptions by module glob under `exceptions`, or is the
text of a policy. The settings of a run hold the text, so a run does not depend on the file later.
"""

from __future__ import annotations

from narrowcast.config.limits import LARGEST_FILE
from narrowcast.config.problems import shown, shown_path
from narrowcast.config.yaml_text import YamlError, parse
from narrowcast.errors import ConfigError
from narrowcast.plain_files import expand_path, read_plain

MARK = "@"
"""What the name of a policy file begins with."""
KEYS = ("policy", "exceptions")


def policy_text(text: str) -> str:
    """Return the text of a policy; that of the file if it is `@` and a path."""
    return read_policy(text.strip()[1:]) if text.strip().startswith(MARK) else text


def read_policy(name: str) -> str:
    """Return the policy in a file as one text, exceptions included."""
    path = expand_path(name.strip())
    if not name.strip():
        raise ConfigError("a policy file needs a name after @. Write e.g. @policy.yaml")
    where = shown_path(path)
    try:
        content = read_plain(path, most=LARGEST_FILE).decode("utf-8-sig")
        document = parse(content)
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: no such policy file. Write one with narrowcast tune, or write the policy "
            "itself"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read the policy file {where}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"a policy file must be UTF-8 text, which {where} is not") from None
    except YamlError as error:
        raise ConfigError(f"{where}:{error.line}: {error}") from None
    for line, problem in document.problems:
        raise ConfigError(f"{where}:{line}: {problem}")
    value = document.value
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("policy"), str):
        raise ConfigError(
            f"{where}: a policy file must have a policy, got {shown(value)}. Begin with e.g. "
            "policy: bf16"
        )
    if unknown := [key for key in value if key not in KEYS]:
        raise ConfigError(
            f"{where}: no such key in a policy file: {unknown[0]}. It has policy and exceptions"
        )
    exceptions = value.get("exceptions") or {}
    if not isinstance(exceptions, dict) or not all(
        isinstance(roles, str) for roles in exceptions.values()
    ):
        raise ConfigError(
            f"{where}: exceptions must be one `glob: format` per line, got {shown(exceptions)}. "
            'Write e.g. "*.norm": fp32'
        )
    return "; ".join([value["policy"], *(f"{glob}: {roles}" for glob, roles in exceptions.items())])
