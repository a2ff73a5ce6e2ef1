"""What is written goes to the disk while more is written, and what that could not write is an error of ours."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import wait
from typing import TYPE_CHECKING

import numpy as np
import pytest

import deltastore.materialize
from deltastore.checkpoint import Layout, WeightFile
from deltastore.container import build_header, parse_header
from deltastore.errors import DiskFull
from deltastore.materialize import DirectoryWriter
from deltastore.places import Places
from deltastore.snapshot import chunk_spans

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 4096


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DirectoryWriter:
    monkeypatch.setattr(deltastore.materialize, "_FLUSH_BYTES", SIZE)
    header = build_header([("a", "U8", (SIZE,))], {})
    layout = Layout((WeightFile("model.safetensors", header, parse_header(header, key="file")),))
    return DirectoryWriter(tmp_path, layout, Places([layout.files[0].header], layout.schema()))


def write(writer: DirectoryWriter) -> None:
    (span,) = chunk_spans(writer._layout.schema(), np.arange(1))
    writer.write(span, np.ones(SIZE, np.uint8))


def test_what_was_written_is_sent_to_the_disk_before_the_end(
    writer: DirectoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: sent.set())
    with writer:
        write(writer)
        assert sent.wait(30)
        writer.sync()


def test_bytes_that_could_not_be_sent_fail_the_whole(writer: DirectoryWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # The system tells such an error once: the fsync at the end knows nothing of it any more.
    monkeypatch.setattr(os, "fdatasync", fail)
    with writer:
        write(writer)
        with pytest.raises(DiskFull, match=r"model\.safetensors"):
            writer.sync()


def test_an_error_at_the_disk_stops_the_writing(writer: DirectoryWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", fail)
    with writer:
        write(writer)
        assert writer._flushing is not None
        wait([writer._flushing], timeout=30)
        with pytest.raises(DiskFull):
            write(writer)
