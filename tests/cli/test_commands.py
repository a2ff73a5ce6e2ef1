"""The command line's contract: exit codes, JSON fields, and errors that say what to do."""

from __future__ import annotations

import pytest
import training

from deltastore import open_store


@pytest.fixture
def store(tmp_path, commands):
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    commands.run("deltastore", "init", tmp_path / "store", "--base", base).ok()
    return tmp_path / "store"


def checkpoint(tmp_path, seed):
    return training.save(tmp_path / f"checkpoint{seed}", training.small_snapshot(seed))


def test_the_documented_fields_of_each_record_are_there(store, tmp_path, commands):
    words = ["--step", "7", "--meta", "lr=1e-6", "--meta", "name=x y", "--meta", "ok=true", "--meta", "none=null"]
    published = commands.run("deltastore", "publish", store, checkpoint(tmp_path, 1), *words, "--json").ok().json
    fields = {
        "version", "snapshot_id", "parent_version", "parent_snapshot_id", "kind", "step", "created_at", "commit_id",
        "changed_elements", "total_elements", "changed_fraction", "stored_bytes", "snapshot_bytes", "ratio", "anchored",
        "tags", "metadata",
    }  # fmt: skip
    assert fields <= set(published)
    assert published["metadata"] == {"lr": 1e-6, "name": "x y", "ok": True, "none": None}
    assert published["step"] == 7
    log = commands.run("deltastore", "log", store, "--json").ok().json
    assert set(log) >= {"stream_id", "versions"}
    assert all(fields <= set(entry) for entry in log["versions"])
    plan = commands.run("deltastore", "plan", store, "--from", "none", "--to", "latest", "--json").ok().json
    assert plan["from"] is None
    assert plan["to"] == 1
    assert [step["kind"] for step in plan["steps"]] == ["anchor", "delta"]
    assert plan["stored_bytes"] == sum(step["stored_bytes"] for step in plan["steps"])
    check = commands.run("deltastore", "check", store, "--json").ok().json
    assert set(check) >= {"ok", "objects", "bytes_read", "problems"}
    show = commands.run("deltastore", "show", store, "latest", "--tensors", "--json").ok().json
    assert {row["name"] for row in show["tensors"]} == set(training.small_snapshot(0))
    assert sum(row["changed_elements"] for row in show["tensors"]) == show["changed_elements"]
    for verb in (["show", store, "1"], ["show", store, "0", "--tensors"], ["plan", store, "--from", "1", "--to", "0"]):
        assert commands.run("deltastore", *verb).ok().out


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (10, ["log", "{root}/nothing"]),
        (10, ["show", "{root}/nothing", "0"]),
        (10, ["plan", "{root}/nothing", "--from", "none"]),
        (10, ["restore", "{root}/nothing", "0", "{root}/out"]),
        (10, ["check", "{root}/nothing"]),
        (10, ["publish", "{root}/nothing", "{root}/base"]),
        (10, ["publish", "{root}/nothing", "{root}/base", "--base", "{root}/base"]),
        (10, ["show", "{store}", "1"]),
        (10, ["show", "{store}", "1" * 5000]),
        (10, ["show", "{store}", "9999999999"]),
        (10, ["show", "{store}", "99999999999999999999"]),
        (10, ["restore", "{store}", "tag:none", "{root}/out"]),
        (10, ["plan", "{store}", "--from", "4", "--to", "0"]),
        (2, ["show", "{store}", "newest"]),
        (2, ["show", "{store}", "²"]),
        (2, ["restore", "{store}", "0", "{root}/base"]),
        (2, ["restore", "{store}", "0", "{root}/base/config.json"]),
        (2, ["restore", "{store}", "0", "{root}/out", "--max-bandwidth", "0"]),
        (2, ["restore", "{store}", "0", "{root}/out", "--max-bandwidth", "fast"]),
        (2, ["log", "{store}", "-n", "0"]),
        (2, ["log"]),
        (2, ["nonsense"]),
        (2, ["log", "ftp://host/place"]),
        (2, ["publish", "{store}", "{root}/base", "--meta", "novalue"]),
        (2, ["publish", "{store}", "{root}/base", "--meta", "list=[1]"]),
        (2, ["log", "{store}", "--storage-option", "a=b"]),
        (11, ["init", "{store}", "--base", "{root}/base"]),
        (1, ["init", "{root}/new", "--base", "{root}/nothing"]),
        (1, ["publish", "{store}", "{root}/nothing"]),
        (1, ["init", "{root}/base/config.json", "--base", "{root}/base"]),
        (1, ["init", "/proc/store", "--base", "{root}/base"]),
    ],
)
def test_what_cannot_be_done_ends_with_its_code_and_says_what_to_do(code, words, store, tmp_path, commands):
    ended = commands.run("deltastore", *(word.format(root=tmp_path, store=store) for word in words))
    assert ended.code == code, ended
    assert ended.out == ""
    assert "Traceback" not in ended.err
    if code != 2 or "Error: " in ended.err:
        assert "Try" in ended.err, ended.err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "nothing").exists()
    assert open_store(store).latest().version == 0


def test_debug_shows_where_an_error_came_from(tmp_path, commands):
    ended = commands.run("deltastore", "log", tmp_path, "--debug")
    assert ended.code == 10
    assert "Traceback" in ended.err


def test_a_damaged_store_ends_with_three(store, commands):
    part = next((store / "parts").rglob("model-0*.safetensors"))
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert commands.run("deltastore", "check", store).ok()  # sizes alone do not show it
    ended = commands.run("deltastore", "check", store, "--read-data", "--json")
    assert ended.code == 3
    report = ended.json
    assert not report["ok"]
    assert [problem["key"] for problem in report["problems"]] == [part.relative_to(store).as_posix()]
    part.unlink()
    ended = commands.run("deltastore", "check", store)
    assert ended.code == 3
    assert part.name in ended.out


def test_output_into_a_closed_pipe_is_no_traceback(store, tmp_path):
    import os  # noqa: PLC0415 - only here
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    root = Path(__file__).resolve().parents[2]
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-m", "deltastore", "log", str(store), "--json"],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert ended.returncode == 1
    assert ended.stderr == b""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_keep_nothing_from_being_done(store, tmp_path, closed):
    import os  # noqa: PLC0415 - only here
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    live = tmp_path / "live"
    for code, module, *words in (
        (0, "receiver", "once", "--store", store, "--checkpoint", live),
        (0, "receiver", "verify", "--checkpoint", live),
        (0, "deltastore", "restore", store, "0", tmp_path / "out"),
        (2, "deltastore", "forget", store, "--keep-last", "1"),
        (10, "deltastore", "log", tmp_path / "nothing"),
    ):
        ended = subprocess.run(
            ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", module, *map(str, words)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        assert ended.returncode == code, (words, ended)
        assert b"Traceback" not in ended.stderr
    training.assert_holds(live, training.small_snapshot(0))
    training.assert_holds(tmp_path / "out", training.small_snapshot(0))


def test_an_answer_that_cannot_be_written_is_no_traceback(store):
    import os  # noqa: PLC0415 - only here
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "deltastore", "log", str(store)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            text=True,
        )
    assert ended.returncode == 1
    assert "No space left" in ended.stderr
    assert "Try: " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("code", "meta"), [(1, "a=\udcff"), (1, "\udcff=a")])
def test_metadata_that_is_not_unicode_is_refused(code, meta, store, tmp_path, commands):
    ended = commands.run("deltastore", "publish", store, checkpoint(tmp_path, 1), "--meta", meta)
    assert ended.code == code
    assert "Traceback" not in ended.err
    assert open_store(store).latest().version == 0


@pytest.mark.parametrize("poll", ["nan", "inf", "0", "-1"])
def test_a_poll_is_a_number_of_seconds(poll, store, tmp_path, commands):
    ended = commands.run("receiver", "run", "--store", store, "--checkpoint", tmp_path / "live", "--poll", poll)
    assert ended.code == 2
    assert "--poll" in ended.err


def test_a_checkpoint_at_the_root_is_wrong_use(store, commands):
    ended = commands.run("receiver", "once", "--store", store, "--checkpoint", "/")
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert "Try: " in ended.err


@pytest.mark.parametrize(("share", "reads"), [("0", False), ("100", True), ("100%", True), ("99.9 %", True)])
def test_a_share_of_the_parts_may_be_given_with_its_sign(share, reads, store, commands):
    report = commands.run("deltastore", "check", store, "--read-data-subset", share, "--json").ok().json
    assert report["ok"]
    assert (report["bytes_read"] > 0) == reads


@pytest.mark.parametrize("share", ["-1", "101%", "x", "%", "nan"])
def test_a_share_that_is_none_is_wrong_use(share, store, commands):
    assert commands.run("deltastore", "check", store, "--read-data-subset", share).code == 2


def test_a_plan_of_many_steps_needs_no_more_descriptors_than_a_shell_gives(store, tmp_path):
    import os  # noqa: PLC0415 - only here
    import resource  # noqa: PLC0415
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415
    from pathlib import Path  # noqa: PLC0415

    from deltastore import Writer  # noqa: PLC0415

    with Writer(store, base=tmp_path / "base") as writer:
        for seed in range(1, 41):
            writer.publish(training.small_snapshot(seed)).result()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    ended = subprocess.run(
        [sys.executable, "-m", "deltastore", "restore", str(store), "40", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (30, most)),
        capture_output=True,
        check=False,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
