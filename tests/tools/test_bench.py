"""The bench runs, finishes, and its JSON has the fields that the documentation promises."""

from __future__ import annotations

import json

import pytest

from tools.bench.__main__ import BENCHES, main

SECTIONS = {
    "codec": {
        "limits": {"limit", "gbps"},
        "codec": {
            *("case", "source", "threads", "bytes", "changed"),
            *("yardstick_encode_gbps", "yardstick_apply_gbps", "yardstick_stored"),
            *("limit_encode_gbps", "limit_apply_gbps"),
            *(f"{level}_{figure}_ratio" for level in ("fast", "max") for figure in ("encode", "stored", "apply")),
            *(f"{level}_{figure}_gbps" for level in ("fast", "max") for figure in ("encode", "apply")),
        },
    },
    "publish": {
        "limits": {"limit", "gbps"},
        "publish": {
            *("case", "threads", "bytes", "changed", "yardstick_seconds", "seconds", "gbps", "ratio", "stored_ratio"),
            *("encode", "upload", "commit", "advance"),
        },
        "overlap": {"case", "link_mbps", "parts", "upload_seconds", "encode_seconds", "seconds", "ratio"},
    },
    "patch": {
        "limits": {"limit", "gbps"},
        "patch": {"case", "threads", "bytes", "changed", "yardstick_seconds", "seconds", "gbps", "ratio"},
        "overlap": {"case", "link_mbps", "parts", "fetch_seconds", "patch_seconds", "seconds", "ratio"},
    },
    "memory": {"memory": {"case", "bytes", "writer_peak", "writer_extra", "receiver_peak"}},
    "scale": {"scale": {"bytes", "tensors", "publish_seconds", "publish_gbps", "patch_seconds", "patch_gbps"}},
    "tiny": {"tiny": {"tensors", "bytes", "publish_seconds", "publish_us", "patch_seconds", "patch_us"}},
    "routes": {"routes": {"way", "steps", "stored_bytes", "share", "objects", "plan_seconds", "build_seconds"}},
    "storage": {"storage": {"client", "call", "object_bytes", "bytes", "gbps", "cpu_seconds_per_gb"}},
    "generation": {
        "generation": {"beside", "engine_bytes", "bytes", "patch_seconds", "alone", "meanwhile", "ratio", "ratios"}
    },
    "gpu": {},
}
EXTRA = {"codec": ("--mib", "1", "--case", "f32"), "scale": ("--sizes", "1"), "memory": ("--sizes", "1")}


def run(capsys, tmp_path, *arguments: str) -> str:
    (tmp_path / "scratch").mkdir()
    places = ("--directory", str(tmp_path / "scratch"), "--cache", str(tmp_path / "cache"))
    assert main([*arguments, "--quick", "--rounds", "1", *places]) == 0
    assert not any((tmp_path / "scratch").iterdir())
    return capsys.readouterr().out


@pytest.mark.parametrize("bench", BENCHES)
def test_a_bench_prints_one_json_object(capsys, tmp_path, bench):
    found = json.loads(run(capsys, tmp_path, bench, "--json", *EXTRA.get(bench, ("--mib", "1"))))
    assert found["bench"] == bench
    assert {"date", "machine", "settings", "sections", "targets", "notes"} <= found.keys()
    assert {"cpu", "cores", "memory_bytes", "python", "torch", "numpy"} <= found["machine"].keys()
    for section, fields in SECTIONS[bench].items():
        rows = found["sections"][section]
        assert rows
        assert all(fields <= row.keys() for row in rows)
    for target in found["targets"]:
        assert {"figure", "wanted", "found", "at_most", "met"} <= target.keys()


def test_tables_are_for_people(capsys, tmp_path):
    found = run(capsys, tmp_path, "scale", "--sizes", "1")
    assert found.startswith("scale: ")
    assert "1.0 MiB" in found
    assert "cost of a byte" in found


def test_trained_snapshots_come_from_the_cache_the_second_time(capsys, tmp_path):
    arguments = ("codec", "--json", "--mib", "1", "--case", "trained")
    rows = json.loads(run(capsys, tmp_path, *arguments))["sections"]["codec"]
    assert {row["case"] for row in rows} == {"trained 1e-06", "trained 2e-06", "trained 3e-06"}
    assert all(0 < row["changed"] < 0.2 for row in rows)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    (tmp_path / "scratch").rmdir()
    run(capsys, tmp_path, *arguments)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == times
