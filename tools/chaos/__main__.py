"""``python -m tools.chaos --target HOST:PORT --script FILE``: a faulty link, until it is interrupted."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from deltastore.errors import UsageError

from .proxy import ChaosProxy
from .rules import read_rules


def main() -> int:
    """Print the address at the start, the traffic by kind of fault at the end."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="the server behind the proxy")
    parser.add_argument("--listen", type=int, default=0, metavar="PORT", help="the port to listen on (any free one)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same faults")
    parser.add_argument("--script", type=Path, metavar="FILE", help="a JSON list of rules; no faults without one")
    options = parser.parse_args()
    host, _, port = options.target.rpartition(":")
    try:
        proxy = ChaosProxy(host, int(port), seed=options.seed)
        proxy.play(read_rules(options.script) if options.script else [])
    except (UsageError, ValueError) as error:
        parser.error(str(error))
    asyncio.run(_serve(proxy, options.listen))
    print(json.dumps({kind: asdict(count) for kind, count in proxy.traffic.items()}, indent=2))
    return 0


async def _serve(proxy: ChaosProxy, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = await proxy.listen(port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    await stopped.wait()
    server.close()
    proxy.hang_up()


if __name__ == "__main__":
    sys.exit(main())
