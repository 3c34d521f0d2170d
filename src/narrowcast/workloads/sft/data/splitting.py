"""Which rows are kept for validation: drawn by the seed and by what they say, not by where."""

import hashlib

from narrowcast.errors import ConfigError
from narrowcast.workloads.sft.data.tokenised import TokenRows


def split_rows(rows: TokenRows, share: float, *, seed: int) -> tuple[TokenRows, TokenRows | None]:
    """Return rows to train on and, unless `share` is 0, about that share to validate on.

    Rows that say the same are on the same side, and a row that is added or moved elsewhere in the
    file changes the side of few others.
    """
    if share == 0:
        return rows, None
    drawn = _digests(rows, seed)
    order = sorted(set(drawn))
    if len(order) < 2:
        raise ConfigError(
            f"data.validation_split={share} needs at least two different rows. Write "
            "data.validation_split=0 to train without validation."
        )
    wanted = min(max(round(share * len(order)), 1), len(order) - 1)
    held = set(order[:wanted])
    train = [number for number, digest in enumerate(drawn) if digest not in held]
    return rows.taken(train), rows.taken(n for n, digest in enumerate(drawn) if digest in held)


def rows_in_both(train: TokenRows, validation: TokenRows) -> int:
    """Count the rows to validate on that are trained on too."""
    known = set(_digests(train, 0))
    return sum(digest in known for digest in _digests(validation, 0))


def _digests(rows: TokenRows, seed: int) -> list[bytes]:
    key = seed.to_bytes(8, "little")
    return [
        hashlib.blake2b(rows.row(number)[0].tobytes(), key=key, digest_size=16).digest()
        for number in range(len(rows))
    ]
