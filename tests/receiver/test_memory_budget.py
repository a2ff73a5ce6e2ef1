"""What a receiver takes under a budget, measured from outside of it: the model's size does not matter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltastore.limits import _PROCESS_BYTES

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
LARGE = 2048 if os.environ.get("DELTASTORE_THOROUGH") else 384

#: Makes a store of one version, in which every element of float32 weights changes: as much is stored as there are
#: weights, and the decoder needs all of its buffers.
MAKE = """
import sys
from pathlib import Path
from deltastore import Writer, open_checkpoint
from tools.bench.pairs import repeated, write_checkpoint
from tools.bench.synthetic import make_pair
home, nbytes = Path(sys.argv[1]), int(sys.argv[2])
pair = repeated(make_pair("f32", 1.0, 16 << 20), nbytes)
write_checkpoint(home / "base", pair.schema, pair.old)
write_checkpoint(home / "new", pair.schema, pair.new)
with Writer(home / "store", base=home / "base", upload_base=False, spool=home) as writer:
    writer.publish(open_checkpoint(home / "new")).result()
"""
RECEIVE = """
import sys
from pathlib import Path
from deltastore.codec.applying import warm_up_applying
from receiver.daemon import Receiver
from receiver.options import Options
from receiver.status import Status
from tools.bench.probe import peak_of
home, budget = Path(sys.argv[1]), int(sys.argv[2])
warm_up_applying([4])
checkpoint = home / "model"
if sys.argv[3] == "mend":  # every chunk has to be had again
    for file in checkpoint.glob("*.safetensors"):
        header = 8 + int.from_bytes(file.open("rb").read(8), "little")
        with file.open("r+b") as stream:
            for offset in range(header, file.stat().st_size, 1 << 20):
                stream.seek(offset)
                stream.write(b"damage")
made = Receiver(
    Options(store=str(home / "store"), checkpoint=checkpoint, base=home / "base", memory_budget=budget),
    Status(store="", checkpoint="", target="latest"),
)
print(*peak_of(made.once))
mended = made._status.record()["last_repair"]
assert (mended is not None and mended["from_store"] > 10) == (sys.argv[3] == "mend"), mended
"""


def python(script: str, *words: object) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's accounts of memory")
def test_the_peak_stays_below_the_budget_whatever_the_models_size(tmp_path: Path) -> None:
    budget = 256 * MIB
    peaks = {}
    for size in (32, LARGE):
        home = tmp_path / str(size)
        home.mkdir()
        python(MAKE, home, size * MIB)
        for what in ("patch", "mend"):
            peaks[size, what] = tuple(map(int, python(RECEIVE, home, budget, what).split()))
    assert max(peak for _, peak in peaks.values()) < budget
    # Most of the budget is for an interpreter that compiles its kernels; these were compiled before.
    assert max(peak - before for before, peak in peaks.values()) < budget - _PROCESS_BYTES
