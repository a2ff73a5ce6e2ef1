"""A stream that receivers in this process follow, and the engine behind them."""

from __future__ import annotations

import pytest
from following import Run, ScriptedEngine, put_behind_receivers


@pytest.fixture
def engine(monkeypatch):
    return put_behind_receivers(ScriptedEngine(), monkeypatch)


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    made.publish()
    return made
