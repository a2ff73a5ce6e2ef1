"""The C libraries by address: what kernels get of them is what their Python packages give."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from deltastore.codec import libraries
from deltastore.codec.lanes import jit_step


@jit_step
def compressed(zstd, raw, out):
    return libraries.compress(zstd, raw, out)


@jit_step
def decompressed(zstd, frame, out):
    return libraries.decompress(zstd, frame, out)


@jit_step
def hashed(xxh3, data, out):
    libraries.write_digest(xxh3, data, out)


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


def guarded(size: int) -> tuple[np.ndarray, np.ndarray]:
    buffer = np.full(size + 128, 0xA5, np.uint8)
    return buffer[64 : 64 + size], buffer


def guards_hold(buffer: np.ndarray) -> bool:
    return bool((buffer[:64] == 0xA5).all() and (buffer[-64:] == 0xA5).all())


@given(st.binary(max_size=2000))
@example(b"")
@example(bytes(5000))
@example(b"abc" * 1000)
@example(np.random.default_rng(1).bytes(300_000))
def test_digests_are_those_of_the_package(data: bytes) -> None:
    address = libraries.hash_address("xxh3-128")
    if not address:
        pytest.skip("its function is not known here: it is called from Python")
    out, buffer = guarded(16)
    hashed(address, array(data), out)
    assert out.tobytes() == xxh3_128_digest(data)
    assert guards_hold(buffer)


def test_the_hash_of_the_format_is_found_on_the_usual_processors_and_no_other_one_is() -> None:
    assert libraries.hash_address("xxh3-128")
    assert libraries.hash_address("blake3") == 0


@given(st.binary(max_size=3000), st.integers(0, 64))
def test_frames_lead_back_and_none_is_written_past_its_room(data: bytes, short: int) -> None:
    compressor, decompressor = libraries.Compressor(compressionLevel=1), libraries.Decompressor()
    out, buffer = guarded(len(data) + 600)
    size = compressed(compressor.handle, array(data), out)
    assert zstandard.ZstdDecompressor().decompress(out[:size].tobytes(), max_output_size=len(data) + 1) == data
    small, small_buffer = guarded(max(size - 1 - short, 0))
    assert compressed(compressor.handle, array(data), small) > len(data) + 600
    assert guards_hold(buffer)
    assert guards_hold(small_buffer)
    frame = out[:size].copy()
    raw, raw_buffer = guarded(len(data))
    assert decompressed(decompressor.handle, frame, raw)
    assert raw.tobytes() == data
    for wrong in (len(data) + 1, len(data) - 1):
        other, other_buffer = guarded(max(wrong, 0))
        assert not decompressed(decompressor.handle, frame, other) or wrong < 0
        assert guards_hold(other_buffer)
    assert guards_hold(raw_buffer)


@given(st.binary(min_size=1, max_size=800), st.integers(0, 2**32 - 1))
def test_damaged_frames_are_told_and_write_nothing_outside(data: bytes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    decompressor = libraries.Decompressor()
    frame = array(zstandard.ZstdCompressor(level=1, write_checksum=False).compress(data))
    for _ in range(20):
        damaged = frame.copy()
        damaged[rng.integers(0, frame.size, rng.integers(1, 4))] = rng.integers(0, 256)
        damaged = damaged[: rng.integers(0, frame.size + 1)]
        out, buffer = guarded(len(data))
        if decompressed(decompressor.handle, damaged, out):
            assert zstandard.ZstdDecompressor().decompress(damaged.tobytes()) == out.tobytes()
        assert guards_hold(buffer)


def test_a_parameter_that_zstd_does_not_take_is_told() -> None:
    with pytest.raises(ValueError, match="hashLog=1000"):
        libraries.Compressor(hashLog=1000)


def test_contexts_are_freed_with_their_owners() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:  # noqa: PTH123 - a line of numbers
            return int(file.read().split()[1]) * 4096

    def use() -> None:
        for _ in range(200):
            compressor = libraries.Compressor(compressionLevel=1, windowLog=21)
            compressed(compressor.handle, raw, out)
        gc.collect()

    raw, out = array(np.random.default_rng(0).bytes(1 << 20)), np.empty(2 << 20, np.uint8)
    use()
    before = resident()
    use()
    assert resident() - before < 16 << 20


def test_threads_with_a_context_each_do_not_disturb_each_other() -> None:
    problems = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        compressor, decompressor = libraries.Compressor(compressionLevel=1), libraries.Decompressor()
        for _ in range(200):
            raw = rng.integers(0, 4, rng.integers(1, 50_000)).astype(np.uint8)
            out, back = np.empty(raw.size + 1000, np.uint8), np.empty_like(raw)
            size = compressed(compressor.handle, raw, out)
            if not decompressed(decompressor.handle, out[:size], back) or (back != raw).any():
                problems.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("sys.modules['zstandard._cffi'] = None", "ImportError: zstandard lacks its cffi part"),
        ("import platform; platform.machine = lambda: 'riscv64'", "0"),
        ("import ctypes; ctypes.CDLL = lambda *_: object()", "0"),
    ],
)
def test_functions_that_a_library_keeps_to_itself_are_told_of_or_done_without(missing: str, expected: str) -> None:
    code = (
        f"import sys; import zstandard, numba, llvmlite, xxhash; {missing}\n"
        "from deltastore.codec.libraries import hash_address\n"
        "print(hash_address('xxh3-128'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout + run.stderr).strip().endswith(expected) or expected in run.stderr
