"""An engine that is driven by hooks, for the tests: a file of state, and this program for each step.

It has one request at most: ``running`` in its state, which the test puts there.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

STATE = Path(sys.argv[1])


def read():
    return json.loads(STATE.read_bytes())


def write(**what):
    draft = STATE.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(read() | what))
    draft.replace(STATE)


def pause(in_flight):
    assert in_flight == os.environ["ENGINE_IN_FLIGHT"]
    until = time.monotonic() + float(os.environ["ENGINE_DRAIN_SECONDS"] or 60)
    while in_flight == "wait" and read()["running"]:
        if time.monotonic() > until:
            return 75
        time.sleep(0.01)
    if in_flight == "abort" and read()["running"]:
        write(running=False, aborted=True)
    write(paused=True)
    return 0


def load(checkpoint, version, keep_kv):
    assert (checkpoint, version) == (os.environ["ENGINE_CHECKPOINT"], os.environ["ENGINE_VERSION"])
    assert keep_kv == os.environ["ENGINE_KEEP_KV"]
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    if not files:
        sys.stderr.write(f"reading\nno weights in {checkpoint}\n")
        return 3
    write(version=version, weights=hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest())
    return 0


def resume():
    write(paused=False)
    return 0


def confirm(version):
    return 0 if read()["version"] == version else 4


def info():
    state = read()
    sys.stdout.write(json.dumps({key: state[key] for key in ("incarnation", "version", "paused")}))
    return 0


def probe():
    drawn = bytes.fromhex(read()["weights"])[:8]
    sys.stdout.write(json.dumps({"logprobs": [-value / 100 for value in drawn], "tokens": list(drawn)}))
    return 0


STEPS = {step.__name__: step for step in (pause, load, resume, confirm, info, probe)}

if __name__ == "__main__":
    sys.exit(STEPS[sys.argv[2]](*sys.argv[3:]))
