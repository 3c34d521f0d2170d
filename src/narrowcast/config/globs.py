"""The files that a glob names, as pathlib matches them, without a walk that nobody waits for."""

import errno
import fnmatch
import os
import re
from pathlib import Path

MOST_SEEN = 10**7
"""Files and folders that are looked at: a slip such as /**/x would walk the whole disk."""
ANY_DEPTH = "**"


def matching(glob: Path, *, most_seen: int = MOST_SEEN) -> list[Path]:
    """Return what `glob` matches, in order; raise OSError where too much has to be looked at.

    Folders that may not be read are passed over, and links to folders are not walked down.
    """
    parts = glob.relative_to(glob.anchor).parts
    if any(ANY_DEPTH in part and part != ANY_DEPTH for part in parts):
        raise ValueError(f"{ANY_DEPTH} can only be an entire path component")
    seen = 0
    matches: set[str] = set()
    todo = [(glob.anchor, 0)]  # folders, and the part that is looked for in each
    while todo:
        location, at = todo.pop()
        if at == len(parts):
            matches.add(location)
            continue
        if not re.search(r"[*?[]", parts[at]):
            if os.path.lexists(
                there := f"{location}{'' if location == glob.anchor else os.sep}{parts[at]}"
            ):
                todo.append((there, at + 1))
            continue
        inside = _entries(location)
        seen += len(inside)
        if seen > most_seen:
            text = f"there are more than {most_seen:,} files and folders to look at"
            raise OSError(errno.E2BIG, f"{text}; write a narrower glob", str(glob))
        if parts[at] == ANY_DEPTH:
            todo.append((location, at + 1))
            todo += [(each.path, at) for each in inside if each.is_dir(follow_symlinks=False)]
        else:
            fits = re.compile(fnmatch.translate(parts[at])).match
            todo += [(each.path, at + 1) for each in inside if fits(each.name)]
    return sorted(map(Path, matches))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder or os.curdir) as inside:
            return list(inside)
    except OSError:
        return []
