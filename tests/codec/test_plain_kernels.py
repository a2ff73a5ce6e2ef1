"""The kernels where the vector steps do not compile: other machine code, the same results."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core.errors import LoweringError

from deltastore.codec import lanes

ROOT = Path(__file__).parents[2]
SELECTION = [
    "tests/codec/test_kernels.py",
    "-k",
    "reference_lead or byte_for_byte or single_changed_element or escape_boundary or counted or stops_once or apart",
    "tests/codec/test_context.py::test_the_reference_decodes_what_the_encoder_writes_both_ways",
]


def test_the_kernel_tests_pass_on_plain_loops() -> None:
    code = (
        "import sys, pytest\n"
        "from deltastore.codec import lanes\n"
        "assert lanes.changed_lanes is lanes.plain_changed_lanes\n"
        "assert lanes.equal_bytes is lanes.plain_equal_bytes\n"
        "sys.exit(pytest.main(sys.argv[1:]))\n"
    )
    environment = {**os.environ, "DELTASTORE_PLAIN_KERNELS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *SELECTION],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def test_this_machine_uses_vectors_unless_asked_otherwise() -> None:
    if os.environ.get("DELTASTORE_PLAIN_KERNELS") == "1":
        pytest.skip("asked otherwise")
    if not lanes.vectors_compile():
        pytest.skip("the vector steps do not compile here")
    assert lanes.changed_lanes is lanes.vector_changed_lanes
    assert lanes.equal_bytes is lanes.vector_equal_bytes


@pytest.mark.parametrize("error", [LoweringError("no such vector"), RuntimeError("LLVM IR parsing error")])
def test_vectors_that_do_not_compile_are_found_out(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(_values: np.ndarray) -> int:
        raise error

    monkeypatch.setattr(lanes, "_try_vectors", fail)
    assert not lanes.vectors_compile()


@given(st.integers(0, 2**32 - 1), st.integers(0, 255))
def test_both_kinds_of_steps_make_the_same_masks(seed: int, wanted: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 65536, 64, np.uint16)
    old.view(np.uint8)[rng.random(128) < 0.5] = wanted
    new = np.where(rng.random(64) < 0.5, old, old + 1).astype(np.uint16)
    changed = sum(1 << i for i in range(64) if old[i] != new[i])
    equal = sum(1 << i for i, byte in enumerate(old.tobytes()[:64]) if byte == wanted)
    assert lanes.plain_changed_lanes(old, new, 0) == changed
    assert lanes.plain_equal_bytes(old.view(np.uint8), 0, wanted) == equal


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_fetching_ahead_goes_past_the_end_of_the_memory_and_changes_nothing(width: int) -> None:
    page = mmap.mmap(-1, mmap.PAGESIZE)  # what lies behind it may be nobody's
    values = np.frombuffer(page, f"<u{width}")
    values[:] = 7
    for fetch in (lanes.vector_fetch_kept, lanes.vector_fetch_once, lanes.plain_fetch):
        numba.njit(lambda values, start, fetch=fetch: fetch(values, start))(values, values.size - lanes.LANES)
    assert (values == 7).all()


def test_without_a_place_for_a_cache_kernels_are_compiled_in_each_process() -> None:
    code = (
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"  # as on a read-only root, for a user without a home
        "from deltastore.codec import lanes\n"
        "import numpy as np\n"
        "assert lanes.vectors_compile() is not None\n"
        "lanes._try_vectors(np.zeros(64, np.uint16))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("damage", ["torn", "unwritable"])
def test_a_cache_that_fails_costs_time_and_nothing_else(damage: str, tmp_path: Path) -> None:
    # Only the kernels of this module are compiled: the others' caches are made by the same decorator.
    code = "import numpy as np; from deltastore.codec import lanes; lanes._try_vectors(np.zeros(64, np.uint16))"
    if damage == "unwritable":
        code = (
            "from numba.core import caching\n"
            "def full(*_): raise OSError(28, 'No space left on device')\n"
            "caching.IndexDataCacheFile.save = full\n"
        ) + code
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    for attempt in range(2):
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, (attempt, run.stderr)
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert bool(files) == (damage == "torn")
        for path in files:
            path.write_bytes(path.read_bytes()[:10])


def test_a_kernel_is_compiled_anew_once_any_module_that_it_may_be_made_of_changed(tmp_path: Path) -> None:
    package = tmp_path / "deltastore"
    shutil.copytree(ROOT / "deltastore", package, ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import numpy as np; from deltastore.codec import lanes; lanes._try_vectors(np.zeros(64, np.uint16))\n"
        "print(sum(lanes._try_vectors.stats.cache_hits.values()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("DELTASTORE_PLAIN_KERNELS", None)

    def hits() -> int:
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return int(run.stdout)

    assert not hits()
    assert hits()
    changed = package / "codec" / "kernels.py"
    changed.write_text(changed.read_text() + "# another one\n")
    assert not hits()
