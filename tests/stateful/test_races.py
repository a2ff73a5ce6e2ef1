"""Two writers race for one version: one wins, the other has changed nothing and is fenced until reopened."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import training

from deltastore import Writer, open_store
from deltastore.errors import VersionConflict, WriterFenced
from deltastore.fsck import check
from deltastore.storage import open_backend


def race(url, options, base, rounds, tmp_path):
    contents = [training.small_snapshot(0)]
    with Writer(url, base=base, storage_options=options):
        pass

    def opened():
        return Writer(url, storage_options=options, workers=1)

    barrier = threading.Barrier(2)
    writers = [opened(), opened()]

    def publish(number, snapshot):
        barrier.wait(60)
        try:
            return writers[number].publish(snapshot, metadata={"writer": number}).result()
        except VersionConflict as error:
            return error

    wins = [0, 0]
    with ThreadPoolExecutor(2) as pool:
        for turn in range(rounds):
            offers = [training.small_snapshot(1000 + 2 * turn + number) for number in range(2)]
            outcomes = list(pool.map(publish, range(2), offers))
            lost = [number for number in range(2) if isinstance(outcomes[number], VersionConflict)]
            assert len(lost) == 1, outcomes
            winner, loser = 1 - lost[0], lost[0]
            wins[winner] += 1
            contents.append(offers[winner])
            assert outcomes[winner].version == len(contents) - 1
            with pytest.raises(WriterFenced):
                writers[loser].publish(offers[loser])
            assert writers[loser].version == len(contents) - 2
            writers[loser].close()
            writers[loser] = opened()
            assert writers[loser].version == len(contents) - 1
    # The winner's shadow and the reopened one's are both right: each publishes one more.
    for number in range(2):
        for writer in writers:
            writer.close()
        writers = [opened(), opened()]
        contents.append(training.small_snapshot(9000 + number))
        writers[number].publish(contents[-1]).result()
    for writer in writers:
        writer.close()
    store = open_store(url, storage_options=options)
    history = store.log()
    assert len(history) == len(contents)
    epochs = [manifest.writer_epoch for manifest in history]
    assert epochs == sorted(epochs)
    assert min(wins) > 0
    for version, snapshot in enumerate(contents):
        store.restore(version, tmp_path / str(version))
        training.assert_holds(tmp_path / str(version), snapshot, others=False)
    report = check(open_backend(url, storage_options=options), read_data=True)
    assert report.ok, report.problems
    parts = {info.key for info in open_backend(url, storage_options=options).list("parts/")}
    named = {part.key for manifest in history for entry in manifest.components.values() for part in entry.parts}
    named |= {entry.digests.key for entry in history[0].components.values()}
    named |= {reference.key for reference in history[0].stream.schemas.values()}
    assert parts == named  # the losers took theirs away


@pytest.mark.parametrize("part", range(4))
def test_fifty_races_on_a_local_store(part, tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    race(str(tmp_path / "store"), None, base, 50, tmp_path / "out")


@pytest.mark.s3
def test_twenty_races_on_an_object_store(s3, tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    race(f"{s3.url}/races", dict(s3.storage_options), base, 20, tmp_path / "out")


def test_writers_in_processes_of_their_own(commands, tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    offers = [training.save(tmp_path / f"offer{number}", training.small_snapshot(number)) for number in (1, 2, 3)]
    commands.run("deltastore", "init", tmp_path / "store", "--base", base).ok()
    published = 0
    for _ in range(8):
        started = [commands.start("deltastore", "publish", tmp_path / "store", offer) for offer in offers]
        codes = [command.end().code for command in started]
        assert set(codes) <= {0, 11}
        published += codes.count(0)
        assert open_store(tmp_path / "store").latest().version == published
    assert check(open_backend(str(tmp_path / "store")), read_data=True).ok


def test_processes_that_init_one_place_at_once(commands, tmp_path):
    base = training.save(tmp_path / "base", training.small_snapshot(0))
    for number in range(6):
        store = tmp_path / f"store{number}"
        started = [commands.start("deltastore", "init", store, "--base", base) for _ in range(3)]
        codes = sorted(command.end().code for command in started)
        assert codes == [0, 11, 11]
        assert check(open_backend(str(store)), read_data=True).ok
        open_store(store).restore(0, tmp_path / "out" / str(number))
        training.assert_holds(tmp_path / "out" / str(number), training.small_snapshot(0))
