"""The options that bound what a restore and a receiver take."""

from __future__ import annotations

import pytest
import torch
import training

from deltastore import open_store


@pytest.fixture
def store(tmp_path, commands):
    weights = {"weight": torch.rand(500_000, generator=torch.Generator().manual_seed(1))}
    commands.run("deltastore", "init", tmp_path / "store", "--base", training.save(tmp_path / "base", weights)).ok()
    return tmp_path / "store"


def test_a_restore_takes_the_time_that_its_bandwidth_means(store, tmp_path, commands):
    stored = open_store(store).plan(None, 0).stored_bytes
    outcome = commands.run("deltastore", "restore", store, 0, tmp_path / "out", "--max-bandwidth", "2MB").ok()
    assert outcome.seconds > 0.9 * stored / 2e6 > 0.5
    training.assert_holds(tmp_path / "out", training.load(tmp_path / "base"))


def test_a_receiver_takes_all_bounds_together(store, tmp_path, commands):
    bounds = ["--max-bandwidth", "1GB", "--memory-budget", "0.25GiB", "--nice", "19", "--io-priority", "best-effort:7"]
    commands.run("receiver", "once", "--store", store, "--checkpoint", tmp_path / "live", *bounds).ok()
    training.assert_holds(tmp_path / "live", training.load(tmp_path / "base"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memory-budget", "100MiB"], "Try: Give --memory-budget 242MiB or more"),
        (["--memory-budget", "300MiB", "--cache", "cache"], "368MiB"),
        (["--memory-budget", "256MiB", "--workers", "8"], "fewer --workers"),
        (["--nice", "20"], "--nice"),
        (["--io-priority", "realtime"], "best-effort:7"),
        (["--max-bandwidth", "-1"], "--max-bandwidth"),
    ],
)
def test_bounds_that_cannot_be_are_refused(store, tmp_path, commands, words, told):
    outcome = commands.run("receiver", "once", "--store", store, "--checkpoint", tmp_path / "live", *words)
    assert outcome.code == 2
    assert told in outcome.err
    assert not (tmp_path / "live").exists()
