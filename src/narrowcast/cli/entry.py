"""The command `narrowcast`: its verbs and exit codes.

Verbs import torch, pydantic and rich inside their functions, so that help is fast.
"""

import contextlib
import errno
import io
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from narrowcast import __version__
from narrowcast.cli.bench import bench
from narrowcast.cli.doctor import doctor
from narrowcast.cli.output import OutputLostError, open_output, outlive_output
from narrowcast.cli.plan import plan
from narrowcast.cli.recipes import recipes, schema
from narrowcast.cli.report import compare, report
from narrowcast.cli.train import resume, train, verify_resume
from narrowcast.cli.tune import tune
from narrowcast.cli.watch import watch
from narrowcast.config.registry import Registry
from narrowcast.errors import ConfigError, NarrowcastError

INTERRUPTED = 130
"""128 + SIGINT, as shells count."""

VERBS = (
    doctor,
    recipes,
    plan,
    tune,
    train,
    resume,
    watch,
    report,
    compare,
    bench,
    verify_resume,
    schema,
)
"""In the order of the help: what a new user needs comes first."""


class _Commands(click.Group):
    """The verbs in the order they were added, and the commands of workloads, imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.commands, *_registry().commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (verb := self.commands.get(cmd_name)) is not None:
            return verb
        registry = _registry()
        if clash := registry.clash(cmd_name):
            raise ConfigError(clash)
        owner = registry.commands().get(cmd_name)
        if owner is None:
            return None
        command: click.Command = owner.load_command(cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, verb.get_short_help_str(80)) for name, verb in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        brought = [
            (name, command.about or workload.about)
            for name, workload in _registry().commands().items()
            for command in workload.commands
            if command.name == name
        ]
        if brought:
            with formatter.section("Commands of workloads"):
                formatter.write_dl(brought)


def _registry() -> Registry:
    from narrowcast.workloads import REGISTRY

    return REGISTRY


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "RECIPE is the name of a shipped recipe (see `narrowcast recipes`) or a YAML file. "
        "KEY=VALUE arguments override its settings: steps=200 precision.policy=fp16."
    ),
)
@click.version_option(__version__, prog_name="narrowcast")
def narrowcast() -> None:
    """Mixed- and low-precision training for PyTorch."""


for verb in VERBS:
    narrowcast.add_command(verb)


def main() -> NoReturn:
    """Run the words of the command line, and exit."""
    open_output()
    try:
        try:
            code = run_command(sys.argv[1:])
        except KeyboardInterrupt:  # one more, while the first is being answered
            code = INTERRUPTED
        sys.exit(code)
    finally:
        outlive_output()  # Python writes what is left of it while it shuts down
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # All is said; a Ctrl-C from here on ends the process instead of a line of Python.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_command(overrides: Sequence[str]) -> int:
    """Run the command in `overrides`, print errors on stderr, and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ×: better ? than a traceback
    try:
        code = narrowcast.main(args=list(overrides), prog_name="narrowcast", standalone_mode=False)
    except click.ClickException as error:
        with contextlib.suppress(OutputLostError):
            error.show()
        if isinstance(error, click.NoSuchOption):
            setting = error.option_name.lstrip("-").partition("=")[0]
            _complain(f"Recipe settings have no dashes. Write {setting}=VALUE")
        return error.exit_code
    except NarrowcastError as error:
        _complain(f"narrowcast: {error}")
        return error.exit_code
    except click.Abort:  # what click makes of Ctrl-C
        _complain("narrowcast: interrupted")
        return INTERRUPTED
    except OutputLostError as error:
        if error.errno == errno.EPIPE:
            return 1  # the reader has seen enough
        _complain(f"narrowcast: cannot write the output: {error.strerror}")
        return NarrowcastError.exit_code
    return code if isinstance(code, int) else 0


def _complain(text: str) -> None:
    """Print `text` on stderr, unless stderr is lost."""
    with contextlib.suppress(OutputLostError):
        click.echo(text, err=True)
