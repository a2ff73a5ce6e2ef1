"""What `run` and `once` share: their options, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltastore.cli.app import cache_options, debug_option, key_value_option, storage_options, trusted_keys_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from receiver.daemon import Options

__all__ = ["options_from", "place_options", "receiver_options"]

_PLACE = (
    click.option(
        "--durability",
        type=click.Choice(["none", "version"]),
        default="version",
        show_default=True,
        help="What is on the disk before a version is live: all of it, or (for a tmpfs) nothing is waited for.",
    ),
    click.option(
        "--unsafe-file-system",
        "any_place",
        is_flag=True,
        help="Take a file system that may not keep locks and renames, such as NFS.",
    ),
)


def place_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --durability and --unsafe-file-system."""
    for option in reversed(_PLACE):
        function = option(function)
    return function


_SHARED = (
    click.option("--store", required=True, metavar="URL", help="The store to follow."),
    click.option("--checkpoint", required=True, metavar="DIR", type=Path, help="The local checkpoint; becomes a link."),
    click.option("--base", metavar="DIR", type=Path, help="A checkpoint of the stream to start from."),
    click.option("--target", default="latest", show_default=True, metavar="VERSION", help="The wanted version."),
    click.option(
        "--engine", default="none", show_default=True, metavar="NAME", help="The kind of engine: none or torch."
    ),
    click.option("--engine-url", metavar="URL", help="Where the engine listens."),
    key_value_option("--engine-option", "engine_options", help="An option for the engine's adapter; may be repeated."),
    click.option("--workers", type=click.IntRange(1, 256), help="Threads for chunks (default: one a core)."),
    place_options,
    cache_options,
    trusted_keys_option,
    storage_options,
    debug_option,
)


def receiver_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that `run` and `once` share."""
    for option in reversed(_SHARED):
        function = option(function)
    return function


def options_from(**values: Any) -> Options:
    """Make the daemon's options from the command line's."""
    from receiver.daemon import Options  # noqa: PLC0415 - heavy, and --help does without

    return Options(**values)
