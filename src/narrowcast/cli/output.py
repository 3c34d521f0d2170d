"""The output of this process, and what happens when it is lost (closed pipe, full disk)."""

import io
import os
import sys
from typing import Any, final


class OutputLostError(OSError):
    """What was printed has nowhere to go."""


@final
class _Output(io.FileIO):
    """A stream that raises OutputLostError when it cannot be written."""

    outlived = False
    """Whether what cannot be written is dropped."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]  # None: would have to wait
        try:
            written: int | None = super().write(data)
        except OSError as error:
            if not self.outlived:
                raise OutputLostError(error.errno, error.strerror) from error
            written = None
        return len(data) if written is None and self.outlived else written


def open_output() -> None:
    """Open streams that exist and that raise OutputLostError when they are lost.

    The number of a closed stream (`>&-`) would go to the next file opened, such as the records.
    """
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    sys.stdout = _opened(sys.stdout)
    sys.stderr = _opened(sys.stderr)


def outlive_output(outlived: bool = True) -> None:
    """Drop output that cannot be written from now on; False: raise for it again."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            raw = getattr(stream.buffer, "raw", stream.buffer)
            if isinstance(raw, _Output):
                raw.outlived = outlived


def _opened(stream: Any) -> Any:
    if stream is None:
        number, encoding, at_once = os.open(os.devnull, os.O_WRONLY), "utf-8", False
    elif sys.platform != "win32" and isinstance(stream, io.TextIOWrapper):
        number, encoding, at_once = stream.fileno(), stream.encoding, stream.write_through
    else:
        # A notebook's, which knows what to do with it; or that of a console of Windows, which
        # takes letters and no bytes.
        return stream
    raw = _Output(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if at_once else io.BufferedWriter(raw),  # as python -u has it
        encoding=encoding,
        line_buffering=stream is not None and stream.line_buffering,
        write_through=at_once,
    )
