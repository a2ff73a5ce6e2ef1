from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from receiver.room import remove_directory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A directory of somebody else's, with one file in it."""
    directory = tmp_path / "others"
    directory.mkdir()
    (directory / "file").write_text("theirs")
    return directory


def test_a_directory_goes_with_all_that_is_in_it_and_nothing_that_its_links_lead_to(tmp_path, others) -> None:
    directory = tmp_path / "slot"
    (directory / "below" / "further").mkdir(parents=True)
    (directory / "below" / "link").symlink_to(others)
    for number in range(100):
        (directory / f"{number}.safetensors").write_bytes(b"x")
    (directory / "directory").symlink_to(others)
    (directory / "file").symlink_to(others / "file")
    (directory / "nothing").symlink_to("nowhere")
    os.mkfifo(directory / "pipe")
    (directory / os.fsdecode(b"\xff\n")).touch()
    (directory / "locked").touch(0)
    remove_directory(directory)
    assert [path.name for path in tmp_path.iterdir()] == ["others"]
    assert (others / "file").read_text() == "theirs"


@pytest.mark.parametrize("what", ["link", "file", "nothing"])
def test_what_is_no_directory_is_refused_and_left(tmp_path, others, what) -> None:
    path = tmp_path / "slot"
    if what == "link":
        path.symlink_to(others)
    elif what == "file":
        path.write_text("theirs")
    with pytest.raises(OSError, match="slot"):
        remove_directory(path)
    assert (others / "file").read_text() == "theirs"
    assert what != "file" or path.read_text() == "theirs"
