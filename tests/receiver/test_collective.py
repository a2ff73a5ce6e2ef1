"""Ranks of one job: real processes that share a gloo group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from deltastore.errors import StorageError
from receiver.activation import Weights
from receiver.collective import Collective

rank, size, file, scene = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
coordinator, heard = Collective(timeout=20 if scene != "dies" else 4), []
old, new = (Weights(f"s/{number}", number, str(number) * 32, Path("/")) for number in (1, 2))
wanted = old if scene == "differs" and rank == 1 else new
heard.append(coordinator.may_pause(wanted))
if heard[0]:
    if scene == "dies" and rank == 1:
        os._exit(0)
    loaded = not (scene == "fails" and rank == 1)
    try:
        heard.append(coordinator.may_resume(wanted, loaded=loaded))
        if not heard[-1]:
            heard.append(coordinator.may_resume(old, loaded=True))
    except StorageError:
        heard.append("held")
        heard.append(coordinator.may_pause(old))
        heard.append(coordinator.concerns(old))
print(json.dumps(heard), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("scene", "heard"),
    [
        ("well", [[True, True]] * 3),
        ("fails", [[True, False, True]] * 3),
        ("differs", [[False]] * 3),
        ("dies", [[True, "held", False, False], None, [True, "held", False, False]]),
    ],
)
def test_ranks_decide_alike_or_stay_held(tmp_path, scene, heard):
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "3", str(tmp_path / "group"), scene],
            stdout=subprocess.PIPE,
            env=environment,
            cwd=root,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [json.loads(text) if text else None for text in said] == heard
