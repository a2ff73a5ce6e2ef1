"""What all commands share: lazy verbs, errors as sentences, exit codes, progress bars, JSON."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import traceback
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltastore.errors import DeltastoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Progress = Callable[[str, int, int], object]

__all__ = [
    "LazyGroup",
    "bandwidth_option",
    "cache_options",
    "cache_size_option",
    "debug_option",
    "emit",
    "json_option",
    "local_path",
    "parse_size",
    "progress_bar",
    "run",
    "sign_key_option",
    "size_option",
    "storage_options",
    "store_options",
    "trusted_keys_option",
]

_INTERRUPTED = 130
_OPEN_FILES = 1 << 16

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) *([A-Za-z]{0,3})", re.ASCII)
_UNITS: dict[str, int] = {"B": 1} | {
    f"{letter}{end}": base**power
    for base, letters, end in ((1024, "KMGT", "iB"), (1000, "kMGT", "B"))
    for power, letter in enumerate(letters, 1)
}


class LazyGroup(click.Group):
    """A command whose verbs are modules of one package, imported when they are used."""

    def __init__(self, name: str, *, package: str, verbs: Mapping[str, str], help: str) -> None:  # noqa: A002 - click's word
        super().__init__(name, help=help, context_settings={"help_option_names": ["-h", "--help"]})
        self._package = package
        self._verbs = dict(verbs)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the verbs in the order they are documented."""
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Import the verb's module and return its ``command``."""
        if cmd_name not in self._verbs:
            return None
        command: click.Command = import_module(f"{self._package}.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """List the verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._verbs.items()))


def run(group: click.Group) -> int:
    """Run a command line; returns the exit code. Errors become two sentences on standard error."""
    _open_standard_streams()
    _open_many_files()
    code = _run(group)
    # It is decided how this ends: an interrupt while Python itself ends could only add a traceback.
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _open_standard_streams() -> None:
    """Put nothing in the place of standard streams that are closed (``>&-``).

    A file that is opened would else get such a stream's number, and what a library prints would be written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w" if number else "r"))  # noqa: SIM115 - as long as we live


def _open_many_files() -> None:
    """Take what the system grants beyond a shell's usual 1,024: a plan of many steps has parts of each open."""
    granted, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if granted != resource.RLIM_INFINITY and granted < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _run(group: click.Group) -> int:
    debug = "--debug" in sys.argv
    try:
        code = group.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("Interrupted.", file=sys.stderr)  # noqa: T201 - the command line's own voice
        return _INTERRUPTED
    except DeltastoreError as error:
        if debug:
            traceback.print_exc()
        click.echo(f"Error: {str(error).rstrip('.')}.", err=True)
        if error.hint:
            click.echo(f"Try: {error.hint}", err=True)
        return error.exit_code
    except OSError as error:
        # Standard output, above all: its reader went away, or its disk is full. What is left of it must not raise
        # again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            if debug:
                traceback.print_exc()
            click.echo(f"Error: {error.strerror or error}, while the answer was written or a file was used.", err=True)
            click.echo("Try: See with `deltastore log` what was done; --debug shows where it happened.", err=True)
        return 1
    return code if isinstance(code, int) else 0


def _pairs(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for value in values:
        name, found, content = value.partition("=")
        if not found or not name:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE.")
        pairs[name] = content
    return pairs


def parse_size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    """Read a number of bytes as people type it."""
    if value is None:
        return None
    found = _SIZE.fullmatch(value.strip())
    unit = _UNITS.get(found[2] or "B") if found else None
    if found is None or unit is None:
        raise click.BadParameter(f"{value!r} is no size such as 50GiB.")
    number = int(float(found[1]) * unit)
    if not 0 < number <= 2**62:
        raise click.BadParameter(f"{value!r} is out of range.")
    return number


def local_path(text: str) -> Path:
    """Read a path as people type it: an empty one, of a variable that is not set, is not the current directory."""
    if not text or "\0" in text:
        raise click.BadParameter(f"{text!r} is no path.")
    return Path(text)


def key_value_option(*names: str, help: str) -> Callable[[Any], Any]:  # noqa: A002 - click's word
    """Return a repeatable ``KEY=VALUE`` option."""
    return click.option(*names, multiple=True, metavar="KEY=VALUE", callback=_pairs, help=help)


storage_options = key_value_option(
    "--storage-option", "storage_options", help="An option for the storage backend; may be repeated."
)


def size_option(*names: str, metavar: str = "SIZE", help: str) -> Callable[[Any], Any]:  # noqa: A002 - click's word
    """Return an option that takes a number of bytes, as in ``50GiB``."""
    return click.option(*names, metavar=metavar, callback=parse_size, help=help)


cache_size_option = size_option("--cache-size", "cache_bytes", help="Bound of a cache directory (default: 50GiB).")
bandwidth_option = size_option(
    "--max-bandwidth", metavar="SIZE", help="Fetch at most so many bytes a second, as in 50MB (default: no bound)."
)


def _none_if_empty(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...] | None:
    return values or None


trusted_keys_option = click.option(
    "--trusted-key",
    "trusted_keys",
    multiple=True,
    metavar="HEX|FILE",
    callback=_none_if_empty,
    help="Take nothing that this public key did not sign; may be repeated for several keys.",
)
sign_key_option = click.option(
    "--sign-key", metavar="FILE", help="The private key that signs what is written (see `deltastore keygen`)."
)
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback with an error.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def cache_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --cache and --cache-size."""
    option = click.option(
        "--cache", metavar="DIR|URL", help="Read parts through a shared directory, or a site's `receiver cache`."
    )
    decorated: Callable[..., Any] = option(cache_size_option(function))
    return decorated


def store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every verb on a store takes: STORE, --storage-option, --debug."""
    decorated: Callable[..., Any] = click.argument("store")(storage_options(debug_option(function)))
    return decorated


def emit(value: object) -> None:
    """Print a value as JSON on standard output."""
    import msgspec  # noqa: PLC0415 - only where JSON is asked for

    from deltastore.shown import json_bytes  # noqa: PLC0415 - likewise

    text = msgspec.json.format(json_bytes(value), indent=2)
    click.echo(text.decode())


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """Yield a progress callback that draws bars on a terminal's standard error, or ``None`` in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - only on a terminal
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield advance


def parse_scalar(text: str) -> str | int | float | bool | None:
    """Read a metadata value as people type it: a JSON scalar, or else a string."""
    import msgspec  # noqa: PLC0415 - only where metadata is given

    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
    if isinstance(value, (dict, list)):
        raise UsageError(
            f"The metadata value {text!r} is no scalar.", hint="Give a string, number, true, false or null."
        )
    return value if isinstance(value, (str, int, float, bool)) else None
