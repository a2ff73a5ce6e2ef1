"""Signals at odd moments: an activation is brought to its end, whoever runs it, and all else is left off."""

from __future__ import annotations

import signal

import pytest
import training

ENDS = ("SIGTERM", "SIGINT", "SIGHUP")


@pytest.fixture
def hooks(tmp_path):
    """The options of an engine of shell scripts: its load waits for a file, and all is written down."""
    said, go = tmp_path / "said", tmp_path / "go"
    said.touch()
    scripts = {
        "pause": f"echo paused >> {said}",
        "load": f"echo loading >> {said}; while [ ! -e {go} ]; do sleep 0.05; done; echo loaded >> {said}",
        "resume": f"echo resumed >> {said}",
    }
    words = ["--engine", "command"]
    for name, script in scripts.items():
        path = tmp_path / f"{name}.sh"
        path.write_text(f"{script}\n")
        words += ["--engine-option", f"{name}=sh {path}"]
    return words, said, go


@pytest.mark.parametrize("verb", ["run", "once"])
@pytest.mark.parametrize("name", ENDS)
def test_an_activation_is_brought_to_its_end(run, commands, hooks, verb, name):
    words, said, go = hooks
    more = ("--listen", "127.0.0.1:0") if verb == "run" else ()
    command = commands.start("receiver", verb, "--store", run.url, "--checkpoint", run.live, *words, *more)
    training.until(lambda: "loading" in said.read_text(), what=command.err)
    command.send(getattr(signal, name))
    command.send(signal.SIGTERM)
    go.touch()
    ended = command.end(60)
    assert said.read_text().split() == ["paused", "loading", "loaded", "resumed"]
    assert ended.code == (130 if (verb, name) == ("run", "SIGINT") else 0), ended
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("name", ENDS)
def test_once_leaves_a_patch_off_and_says_so(run, commands, name):
    words = ["receiver", "once", "--store", run.url, "--checkpoint", run.live, "--max-bandwidth", "1"]
    command = commands.start(*words)
    parts = run.live.with_name(f"{run.live.name}.slots") / "parts"
    training.until(parts.exists, what=command.err)
    command.send(getattr(signal, name))
    ended = command.end(60)
    assert (ended.code, ended.out) == (130, "")
    assert "Interrupted" in ended.err
    assert "Traceback" not in ended.err
    assert not run.live.exists()
    commands.run("receiver", "once", "--store", run.url, "--checkpoint", run.live).ok()
    training.assert_holds(run.live, run.snapshots[1])
