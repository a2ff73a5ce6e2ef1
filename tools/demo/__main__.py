"""``python -m tools.demo``: from a training step to new tokens, on real input, proven version by version."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.testing.s3_server import s3_server
from tools.demo.picture import draw
from tools.demo.scene import Row, Scene
from tools.demo.train import Trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = (
    "version  changed    stored  ratio  publish   fetch   patch   pause   tokens/s before  during   after",
    "                       KiB              ms      ms      ms      ms",
)


def main() -> int:
    """Run the demonstration; returns 0 only if every proof held."""
    options = _options()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deltastore-demo-") as directory:
        home = Path(directory)
        with _store(options.store, home) as store:
            trainer = Trainer(threads=1)
            parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
            print(
                f"Training a causal language model of {parameters:,} parameters on Python's own library …", flush=True
            )
            loss = trainer.pretrain(options.pretrain)
            print(f"loss {loss:.2f} nats a byte after {options.pretrain} steps; store: {options.store}", flush=True)
            rows, tokens, full = _follow(trainer, home, store, options)
            _check_store(store, home)
    draw(
        rows,
        options.picture,
        full_bytes=full,
        title=f"{parameters:,} parameters, bf16 → {options.scheme}, {options.store} store",
    )
    _conclude(rows, tokens)
    print(f"{options.picture} shows sizes and pauses. {time.monotonic() - begun:.0f} s in all.")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("--store", choices=["local", "s3"], default="local")
    parser.add_argument("--scheme", choices=["fp8_block", "bf16"], default="fp8_block", help="the engine's precision")
    parser.add_argument("--receiver", default="", metavar="OPTIONS", help="more options for it, as in '--nice=19'")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pretrain", type=int, default=120)
    parser.add_argument("--picture", type=Path, default=Path("demo.png"))
    return parser.parse_args()


@contextmanager
def _store(kind: str, home: Path) -> Iterator[str]:
    """Yield a store's URL: a directory, or a bucket of a real S3 server that lives as long as the block."""
    if kind == "local":
        yield str(home / "store")
        return
    with s3_server(home / "s3") as server:
        os.environ.update(server.environment)  # the receiver's process finds the server the same way
        yield f"{server.url}/demo"


def _follow(trainer: Trainer, home: Path, store: str, options: argparse.Namespace) -> tuple[list[Row], int, int]:
    rows = []
    with Scene(
        trainer, home, store=store, scheme=options.scheme, receiver_options=shlex.split(options.receiver)
    ) as scene:
        print("A receiver follows beside an engine that generates all the while; every line below is proven.\n")
        print("\n".join(_HEAD), flush=True)
        for _ in range(options.steps):
            rows.append(scene.step())
            _print_row(rows[-1])
        tokens = scene.prove_tokens()
    return rows, tokens, scene.full_bytes


def _print_row(row: Row) -> None:
    times = "".join(f"{1000 * seconds:8.0f}" for seconds in (row.publish, row.fetch, row.patch, row.pause))
    rates = f"{row.before:18.0f}{row.during:8.0f}{row.after:8.0f}"
    print(
        f"{row.version:7}{row.changed:9.2%}{row.stored_bytes / 1024:10.1f}{row.ratio:7.2%} {times}{rates}", flush=True
    )


def _check_store(store: str, home: Path) -> None:
    """Read every byte of the store, and build the newest version on a host that has nothing."""
    for command in (
        ["deltastore", "check", store, "--read-data"],
        ["receiver", "once", "--log-level", "warning", "--store", store, "--checkpoint", str(home / "newcomer")],
        ["receiver", "verify", "--checkpoint", str(home / "newcomer")],
    ):
        subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.DEVNULL)


def _conclude(rows: list[Row], tokens: int) -> None:
    mean = sum(row.ratio for row in rows) / len(rows)
    quiet = sum(row.before for row in rows)
    during = sum(row.during for row in rows) / quiet
    print(f"""
Proven for each of {len(rows)} versions: the local checkpoint has the manifest's snapshot id and the trainer's bytes;
the engine's weights are the trainer's, requantized, bit for bit. Proven for each of {tokens:,} tokens: its forward pass
ran on one version's whole weights. The store was read back whole, and a host with nothing built the last version.
On average {mean:.2%} of the checkpoint was stored a version; tokens/s while patching: {during:.2f} of before.""")


if __name__ == "__main__":
    sys.exit(main())
