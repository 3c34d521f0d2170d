"""`narrowcast watch`: the live page of a run, on this machine."""

import contextlib
import errno
from typing import TYPE_CHECKING

import click

from narrowcast.cli.options import run_argument
from narrowcast.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from narrowcast.report.live import WatchServer

TRIED = 100
"""Ports after the usual one that are tried; more would mean that something else is wrong."""


@click.command()
@run_argument
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0: any free one.  [default: 6116, or the next free one]",
)
@click.option("--open/--no-open", "opened", default=False, help="Open the page in a browser too.")
def watch(folder: str, port: int | None, opened: bool) -> None:
    """Show the run in DIR as it goes on, on a page of this machine.

    The page follows a run that is going on, one that is resumed, and one that has ended. It is
    read-only, and only this machine can reach it. Ctrl-C ends it.
    """
    from narrowcast.runs import RunFolder

    with RunFolder.open(folder) as run:
        server = _server(run.path, port)
    with contextlib.suppress(KeyboardInterrupt):
        click.echo(f"watching {folder} at {server.url}  (Ctrl-C ends it)")
        if opened:
            import webbrowser

            webbrowser.open(server.url)
        server.run()


def _server(folder: "Path", port: int | None) -> "WatchServer":
    """Listen on `port`, or on the usual one, or say why not."""
    from narrowcast.report.live import DEFAULT_PORT, WatchServer

    wanted = range(DEFAULT_PORT, DEFAULT_PORT + TRIED) if port is None else range(port, port + 1)
    for tried in wanted:
        try:
            server = WatchServer(folder, port=tried)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            continue
        if tried != wanted[0]:
            click.echo(f"port {wanted[0]} is taken, so this is port {tried}", err=True)
        return server
    taken = "are taken" if len(wanted) > 1 else "is taken, or not yours to use"
    raise ConfigError(
        f"--port: {'–'.join(dict.fromkeys(str(p) for p in (wanted[0], wanted[-1])))} {taken}; "
        "write --port 0 for any free one"
    )
