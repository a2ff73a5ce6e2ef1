"""A trainer as a process of its own: publishes checkpoints, one version each. A command of the fork server.

    trainer STORE --spool DIR [--base DIR] [--resume [--takeover] [--weights DIR]] [--stop-before-commit] CHECKPOINT...

Prints the number of each version that is committed, and ends as a command line of ours does.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import training

import deltastore.writer
from deltastore import Writer
from deltastore.errors import DeltastoreError, WriterFenced


def main() -> None:
    parser = argparse.ArgumentParser("trainer")
    parser.add_argument("store")
    parser.add_argument("checkpoints", nargs="*", type=Path)
    for name in ("spool", "base", "weights"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("resume", "takeover", "stop-before-commit"):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_intermixed_args(sys.argv[1:])
    try:
        _train(options)
    except DeltastoreError as error:
        sys.stderr.write(f"{error.kind}: {error}\n")
        sys.exit(error.exit_code)
    sys.exit(0)


def _train(options: argparse.Namespace) -> None:
    options.spool.mkdir(exist_ok=True)
    weights = training.load(options.weights).items() if options.weights else None
    with Writer(
        options.store,
        base=options.base,
        resume=options.resume,
        takeover=options.takeover,
        weights=weights,
        spool=options.spool,
    ) as writer:
        if options.stop_before_commit:
            _stop_before_commit()
        for checkpoint in options.checkpoints:
            snapshot = training.load(checkpoint)
            try:
                version = writer.publish(snapshot).result().version
            except DeltastoreError:
                _assert_fenced(writer, snapshot)
                raise
            sys.stdout.write(f"{version}\n")
            sys.stdout.flush()


def _assert_fenced(writer: Writer, snapshot: training.Snapshot) -> None:
    try:
        writer.publish(snapshot)
    except WriterFenced:
        sys.stderr.write("fenced\n")


def _stop_before_commit() -> None:
    """Fall asleep when everything is uploaded and only the manifest is missing."""
    commit = deltastore.writer.commit

    def sleepy(*arguments: Any, **options: Any) -> None:
        # To this thread: the process as a whole would fall asleep a moment later.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        commit(*arguments, **options)

    deltastore.writer.commit = sleepy
