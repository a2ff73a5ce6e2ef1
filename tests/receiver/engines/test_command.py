"""Hooks: their arguments, their exit codes, and that none outlives its time."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from deltastore.errors import DrainTimeout, EngineError, UsageError
from receiver.engines import make_engine

PYTHON = f"{sys.executable} -I -S"


def engine(tmp_path, **hooks):
    done = dict.fromkeys(("pause", "load", "resume"), f"{PYTHON} -c pass")
    return make_engine("command", options=done | {name.replace("_", "-"): text for name, text in hooks.items()})


def script(tmp_path, text):
    file = tmp_path / "hook.py"
    file.write_text(text)
    return f"{PYTHON} {file}"


def test_only_whole_arguments_are_replaced_and_no_shell_sees_them(tmp_path):
    """A checkpoint may be called anything."""
    hook = script(
        tmp_path, "import os, sys\nopen(sys.argv[1], 'w').write(repr(sys.argv[2:] + [os.environ['ENGINE_CHECKPOINT']]))"
    )
    checkpoint = tmp_path / "a; touch b $(c) {version}"
    made = engine(
        tmp_path, load=f"{hook} {tmp_path}/seen {{checkpoint}} '{{version}}' x{{version}} '$HOME' {{other}} {{}}"
    )
    made.pause("keep")
    made.load(checkpoint, version="s/1")
    seen = [str(checkpoint), "s/1", "x{version}", "$HOME", "{other}", "{}", str(checkpoint)]
    assert (tmp_path / "seen").read_text() == repr(seen)


def test_what_a_hook_says_before_it_fails_is_shown(tmp_path):
    made = engine(
        tmp_path, load=script(tmp_path, "import sys\nsys.stderr.write('first\\nno such model\\n')\nsys.exit(7)")
    )
    made.pause("keep")
    with pytest.raises(EngineError, match="hook load: exit code 7: no such model") as caught:
        made.load(tmp_path, version="s/1")
    assert (caught.value.key, bool(caught.value.hint)) == ("load", True)


def test_a_temporary_directory_that_is_gone_is_the_hooks_error(tmp_path, monkeypatch):
    """What cleans it up may come between a pause and its load."""
    made = engine(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(EngineError, match="hook pause: it cannot be run"):
        made.pause("keep")


def test_answers_and_arguments_that_cannot_be_are_the_hooks_error(tmp_path):
    info = script(tmp_path, "print('[' * 100000)")
    with pytest.raises(EngineError, match="not JSON"):
        engine(tmp_path, info=info).info()
    probe = script(tmp_path, """print('{"logprobs": [-1.0], "tokens": [Infinity]}')""")
    with pytest.raises(EngineError, match="no logprobs"):
        engine(tmp_path, probe=probe).probe()
    with pytest.raises(EngineError, match="cannot be run"):
        engine(tmp_path, pause="a\0b").pause("keep")


def test_a_hook_is_killed_at_its_time_with_all_its_processes(tmp_path):
    (tmp_path / "hook").write_text('sleep 60 &\necho $! > "$1"\nwait\n')
    made = engine(tmp_path, pause=f"sh {tmp_path}/hook {tmp_path}/child", pause_timeout="1.0")
    began = time.monotonic()
    with pytest.raises(EngineError, match="within 1 s and was killed"):
        made.pause("keep")
    assert time.monotonic() - began < 30
    child = int((tmp_path / "child").read_text())
    until = time.monotonic() + 10
    while alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(child)


def alive(pid):
    """Whether a process runs: one that nobody has waited for yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_a_hook_leaves_behind_is_not_waited_for(tmp_path):
    """A load hook may start the engine, with its own standard output."""
    (tmp_path / "hook").write_text('sleep 60 &\necho $! > "$1"\n')
    made = engine(tmp_path, resume=f"sh {tmp_path}/hook {tmp_path}/child")
    began = time.monotonic()
    made.resume()
    assert time.monotonic() - began < 30
    child = int((tmp_path / "child").read_text())
    assert alive(child)
    os.kill(child, signal.SIGKILL)


def test_exit_code_75_of_a_pause_is_a_drain_that_timed_out(tmp_path):
    made = engine(tmp_path, pause=f"{PYTHON} -c 'raise SystemExit(75)'")
    with pytest.raises(DrainTimeout):
        made.pause("wait", timeout=1)
    assert not made.info().paused


def test_a_program_that_is_not_there_is_told(tmp_path):
    with pytest.raises(EngineError, match="hook resume: it cannot be run"):
        engine(tmp_path, resume="/nowhere/resume").resume()


ODD = {
    "info": ["", "[]", '{"incarnation": "a"}', '{"incarnation": "a", "version": 3, "paused": false}'],
    "probe": ["nothing", '{"tokens": [1]}', '{"logprobs": [[]]}'],
}


@pytest.mark.parametrize(("hook", "output"), [(hook, output) for hook, outputs in ODD.items() for output in outputs])
def test_what_a_hook_prints_has_to_make_sense(tmp_path, hook, output):
    made = engine(tmp_path, **{hook: f"echo '{output}'"})
    with pytest.raises(EngineError, match=f"hook {hook}: it printed"):
        getattr(made, hook)()


def test_a_probe_may_print_what_is_not_finite(tmp_path):
    probe = engine(tmp_path, probe="""echo '{"logprobs": [-0.5, NaN, null]}'""").probe()
    assert [str(value) for value in probe.logprobs] == ["-0.5", "nan", "nan"]
    assert engine(tmp_path).probe() is None


BAD = {
    "no such": ({"stop": "x"}, "no option 'stop'"),
    "no load": ({"pause": "x", "resume": "x"}, "needs a hook for load"),
    "empty": ({"pause": ""}, "names no program"),
    "unclosed quote": ({"pause": "'x"}, "cannot be read"),
    "a time": ({"timeout": "soon"}, "not a number of seconds"),
    "a flag": ({"probes-paused": "true"}, "neither yes nor no"),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_make_no_sense_are_refused(case):
    options, message = BAD[case]
    with pytest.raises(UsageError, match=message) as caught:
        make_engine("command", options=options)
    assert caught.value.hint


SERVER_OPTIONS = {
    "no URL": ("vllm", None, {}, "needs a URL"),
    "no HTTP": ("sglang", "unix:/x", {}, "is not HTTP"),
    "a URL": ("command", "http://127.0.0.1:1", {}, "has no URL"),
    "a prompt": ("vllm", "http://127.0.0.1:1", {"probe-prompt": "1,x"}, "no list of token ids"),
    "no tokens": ("sglang", "http://127.0.0.1:1", {"probe-tokens": "0"}, "not a number above 0"),
    "no model": ("vllm", "http://127.0.0.1:1", {"model": ""}, "is empty"),
    "another's": ("sglang", "http://127.0.0.1:1", {"extension": "yes"}, "no option 'extension'"),
}


@pytest.mark.parametrize("case", SERVER_OPTIONS)
def test_options_of_servers_that_make_no_sense_are_refused(case):
    name, url, options, message = SERVER_OPTIONS[case]
    with pytest.raises(UsageError, match=message):
        make_engine(name, url=url, options=options)


def test_options_reach_the_adapter():
    options = {"probe-prompt": "7,8", "probe-tokens": "3", "extension": "yes", "load-timeout": "5", "model": "m"}
    made = make_engine("vllm", url="http://127.0.0.1:1", options=options)
    assert made.probes_paused
    assert (made._options.probe_prompt, made._options.load_timeout, made._options.model) == ((7, 8), 5.0, "m")
