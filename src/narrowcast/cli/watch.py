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
    help="Port to listen on, 0 for any free port.  [default: 6116, or the next free one]",
)
@click.option("--open/--no-open", "opened", default=False, help="Open the page in a browser.")
def watch(folder: str, port: int | None, opened: bool) -> None:
    """Show the run in DIR on a live local page.

    The page works for running, resumed and finished runs. It is read-only and is served on
    localhost only. Press Ctrl-C to stop it.
    """
    from narrowcast.runs import RunFolder

    with RunFolder.open(folder) as run:
        server = _server(run.path, port)
    with contextlib.suppress(KeyboardInterrupt):
        click.echo(f"watching {folder} at {server.url}  (press Ctrl-C to stop)")
        if opened:
            import webbrowser

            webbrowser.open(server.url)
        server.run()


def _server(folder: "Path", port: int | None) -> "WatchServer":
    """Listen on `port`, or on the first free one from the usual port on."""
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
            click.echo(f"port {wanted[0]} is in use; using port {tried}", err=True)
        return server
    taken = "are taken" if len(wanted) > 1 else "is in use, or you may not use it"
    raise ConfigError(
        f"--port {'–'.join(dict.fromkeys(str(p) for p in (wanted[0], wanted[-1])))} {taken}. "
        "Write --port 0 for any free port"
    )
