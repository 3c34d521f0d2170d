"""Disks that fill up and files that may not grow: said in words, and resumed once there is room."""

import ctypes
import os
import resource
from pathlib import Path

from attacks import tiny
from attacks.case import Case, require_equal, resumed_equal
from attacks.oracle import BAD_INPUT, DONE, Verdict

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000  # CLONE_NEWUSER and CLONE_NEWNS of unshare(2)


def size_limit(case: Case) -> Verdict:
    """Let no file grow beyond a size (`ulimit -f`), then lift the limit."""
    recipe = case.turn(tiny.RECIPES)
    straight, run = case.straight(recipe), case.folder / "run"
    limit = round(2 ** case.rng.uniform(9, 21.2))
    case.tell(f"{recipe}: no file larger than {limit} bytes")

    def limited() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a limit for the output, too, otherwise
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    words = ("train", *tiny.RECIPES[recipe], "--out", run)
    ended = case.run(*words, prepare=limited, codes={DONE, BAD_INPUT})
    return _with_room(case, run, straight, words, ended.code)


def full_disk(case: Case) -> Verdict:
    """Train on a disk of a few hundred kilobytes, and give it more."""
    disk = case.folder / "disk"
    disk.mkdir()
    if not _own_disk(disk):
        return Verdict.NOT_HERE
    recipe = case.turn(tiny.RECIPES)
    straight, run = case.straight(recipe), disk / "run"
    size = round(2 ** case.rng.uniform(3, 11.3)) * 1024
    case.tell(f"{recipe}: a disk of {size} bytes")
    _resize(disk, size)
    words = ("train", *tiny.RECIPES[recipe], "--out", run)
    ended = case.run(*words, codes={DONE, BAD_INPUT})
    if ended.code != DONE and (run / "records.jsonl").exists():
        case.run("resume", run, codes={DONE, BAD_INPUT})  # still full: refused again
    _resize(disk, 2**26)
    return _with_room(case, run, straight, words, ended.code)


def _with_room(
    case: Case, run: Path, straight: Path, words: tuple[str | Path, ...], code: int | None
) -> Verdict:
    if code == DONE:
        require_equal(run, straight)
        return Verdict.FINE
    if not run.exists():
        case.run(*words, codes={DONE})
        require_equal(run, straight)
        return Verdict.REFUSED
    resumed_equal(case, run, straight)
    return Verdict.EQUAL


def _own_disk(folder: Path) -> bool:
    """Mount a disk that only this process and those it starts can see, where that is allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_MOUNTS) != 0:
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError:
        return False
    return bool(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, b"size=64m") == 0)


def _resize(folder: Path, size: int) -> None:
    remount = 32  # MS_REMOUNT of mount(2)
    options = f"size={size}".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", remount, options) != 0:
        raise OSError(ctypes.get_errno(), f"cannot resize {folder}")
