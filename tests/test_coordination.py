"""The objects of groups and turns in a store: strictly parsed, created once, cleaned up, and in nobody's way."""

from __future__ import annotations

import msgspec
import pytest
import training
from hypothesis import given
from hypothesis import strategies as st

from deltastore import Writer
from deltastore.clock import now
from deltastore.errors import CorruptObject, DeltastoreError, StorageError, UsageError
from deltastore.fsck import check
from deltastore.gc import collect
from deltastore.groups import GroupMember, Members, RoundObjects, joined, left, members_ledger
from deltastore.ledger import MAX_COORDINATION_BYTES, Choice, encode_coordination
from deltastore.reader import store_at
from deltastore.storage.local import LocalBackend
from deltastore.testing import Effect, Fault, FaultyBackend
from deltastore.turns import Holder, Turns, given_back, promoting, taken, turns_ledger

STREAM, OTHER = "a" * 32, "b" * 32
CHOICE = Choice(3, "c" * 32)


def turns(number=1, holders=("r1",), **changes):
    held = tuple(Holder(name, 3, now()) for name in holders)
    given = {"stream_id": STREAM, "fleet": "f", "number": number, "holders": held, "by": "r1", "at": now()}
    return Turns(**{**given, **changes})


def take(most=1, name="r1"):
    place = {"stream_id": STREAM, "fleet": "f", "receiver_id": name}
    return lambda known: taken(known, version=3, most=most, **place)


@pytest.fixture
def backend(tmp_path):
    return FaultyBackend(LocalBackend(tmp_path))


@pytest.fixture
def ledger(backend):
    return turns_ledger(backend, stream_id=STREAM, fleet="f")


@pytest.mark.parametrize("effect", [Effect.BEFORE, Effect.AFTER])
def test_a_lost_answer_changes_nothing(backend, ledger, effect):
    backend.add(Fault(operation="create", effect=effect))
    assert ledger.change(take()).holds("r1")
    assert ledger.newest().number == 1
    backend.add(Fault(operation="create", effect=effect))
    assert not ledger.change(lambda known: given_back(known, receiver_id="r1")).holders
    assert ledger.newest().number == 2


def test_a_store_that_refuses_is_told_after_two_tries(backend, ledger):
    for _ in range(3):
        backend.add(Fault(operation="create"))
    with pytest.raises(StorageError):
        ledger.change(take())
    assert ledger.newest() is None


def test_a_change_that_lands_late_is_void_or_found(backend, ledger):
    backend.add(Fault(operation="create", effect=Effect.LATE))
    assert ledger.change(take()).holds("r1")  # sent twice: the second one holds
    backend.land()
    assert [holder.receiver_id for holder in ledger.newest().holders] == ["r1"]


def test_old_records_go_and_a_record_below_the_newest_is_void(backend, ledger):
    for _ in range(10):
        ledger.change(take())
        ledger.change(lambda known: given_back(known, receiver_id="r1"))
    numbers = sorted(info.key for info in backend.list("turns/f/"))
    assert [numbers[0], numbers[-1]] == ["turns/f/0000000012.json", "turns/f/0000000020.json"]
    backend.create("turns/f/0000000003.json", encode_coordination(turns(3, ["sleeper"])))  # who slept since
    assert not ledger.newest().holds("sleeper")


def test_no_more_than_may_be(ledger):
    assert ledger.change(take()).holds("r1")
    assert not ledger.change(take(name="r2")).holds("r2")
    assert ledger.change(take(most=2, name="r2")).holds("r2")
    assert given_back(ledger.newest(), receiver_id="r9") is None


def test_what_was_promoted_is_remembered_for_a_while():
    place = {"stream_id": STREAM, "fleet": "f", "receiver_id": "r1"}
    known = None
    for version in range(100):
        known = promoting(known, Choice(version, "c" * 32), **place)
        assert promoting(known, Choice(version, "c" * 32), **place) is None
    assert [choice.version for choice in known.promoted] == list(range(36, 100))


DAMAGES = [
    encode_coordination(turns(stream_id=OTHER)),
    encode_coordination(turns(fleet="g")),
    encode_coordination(turns(number=2)),
    encode_coordination(turns(holders=["r1", "r1"])),
    encode_coordination(turns(holders=["../r1"])),
    encode_coordination(turns(at="yesterday")),
    encode_coordination(turns())[:-3],
    b"",
    b"x" * (MAX_COORDINATION_BYTES + 1),
]


@pytest.mark.parametrize("data", DAMAGES)
def test_what_breaks_a_rule_is_refused(backend, ledger, data):
    backend.create("turns/f/0000000001.json", data)
    for refused in (ledger.newest, lambda: ledger.change(take())):
        with pytest.raises(CorruptObject) as caught:
            refused()
        assert caught.value.key == "turns/f/0000000001.json"
        assert caught.value.key in caught.value.hint


@given(st.data())
def test_any_flipped_bit_is_found(data):
    record = bytearray(encode_coordination(turns()))
    record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    import tempfile  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as root:
        backend = LocalBackend(root)
        backend.create("turns/f/0000000001.json", bytes(record))
        with pytest.raises(DeltastoreError):
            turns_ledger(backend, stream_id=STREAM, fleet="f").newest()


def test_members_join_once_and_are_replaced_by_hand(backend):
    place = {"stream_id": STREAM, "group": "g", "size": 2}
    ledger = members_ledger(backend, stream_id=STREAM, group="g")
    for name in ("a", "b", "a"):
        ledger.change(lambda known, name=name: joined(known, receiver_id=name, engine=name == "b", **place))
    assert ledger.newest().leader == "b"
    assert ledger.newest().number == 2
    with pytest.raises(UsageError, match="a, b"):
        ledger.change(lambda known: joined(known, receiver_id="c", engine=False, **place))
    ledger.change(lambda known: left(known, receiver_id="a"))
    ledger.change(lambda known: joined(known, receiver_id="c", engine=False, **place))
    assert ledger.newest().ids == {"b", "c"}
    with pytest.raises(UsageError, match="not 3"):
        ledger.change(lambda known: joined(known, receiver_id="d", engine=False, **{**place, "size": 3}))


def test_a_member_record_with_more_than_its_size_is_refused(backend):
    members = tuple(GroupMember(name, False) for name in "abc")
    record = Members(stream_id=STREAM, group="g", number=1, size=2, members=members, at=now())
    backend.create("groups/g/members/0000000001.json", encode_coordination(record))
    with pytest.raises(CorruptObject):
        members_ledger(backend, stream_id=STREAM, group="g").newest()


def test_round_objects_are_created_once_and_those_of_other_rounds_and_members_are_refused(backend):
    mine = RoundObjects(backend, stream_id=STREAM, group="g", receiver_id="a")
    other = RoundObjects(backend, stream_id=STREAM, group="g", receiver_id="b")
    mine.begin(1, wanted=CHOICE, served=None, failed=None)
    other.begin(1, wanted=Choice(4, "d" * 32), served=None, failed=None)
    assert mine.wanted(1).wanted == other.wanted(1).wanted == CHOICE
    mine.decide_go(1, commit=True, members=frozenset("ab"))
    other.decide_go(1, commit=False, members=frozenset())
    assert other.go(1).commit
    mine.report_loaded(1, loaded=True)
    mine.report_loaded(1, loaded=False)
    assert (mine.loaded(1, "a"), mine.loaded(1, "b"), mine.ready(1, "a")) == (True, None, False)
    other.decide_outcome(1, resume=False)
    mine.decide_outcome(1, resume=True)
    assert not mine.outcome(1).resume
    backend.create("groups/g/rounds/0000000002/go.json", backend.read("groups/g/rounds/0000000001/go.json", limit=9999))
    with pytest.raises(CorruptObject):
        mine.go(2)
    report = backend.read("groups/g/rounds/0000000001/loaded/a.json", limit=9999)
    backend.create("groups/g/rounds/0000000001/loaded/b.json", report)
    with pytest.raises(CorruptObject):
        mine.loaded(1, "b")
    backend.create("groups/g/rounds/0000000003/outcome.json", report.replace(b"1", b"2"))
    with pytest.raises(CorruptObject) as caught:
        mine.outcome(3)
    assert "delete groups/g/" in caught.value.hint
    assert mine.newest() == 1
    for number in range(2, 9):
        mine.begin(number, wanted=CHOICE, served=None, failed=None)
    mine.clean(8)
    assert mine.wanted(3) is None
    assert mine.go(1) is None
    assert mine.wanted(4) is not None


def test_collection_and_checks_leave_them_alone(tmp_path):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", training.small_snapshot(0))) as writer:
        writer.publish(training.small_snapshot(1)).result()
    store = store_at(LocalBackend(tmp_path / "store"))
    ledger = turns_ledger(store.backend, stream_id=store.stream_id, fleet="f")
    ledger.change(lambda known: taken(known, stream_id=store.stream_id, fleet="f", receiver_id="r", version=1, most=1))
    objects = RoundObjects(store.backend, stream_id=store.stream_id, group="g", receiver_id="a")
    objects.begin(1, wanted=CHOICE, served=None, failed=None)
    before = {info.key for info in store.backend.list("")}
    collect(store)
    assert {info.key for info in store.backend.list("")} == before
    assert check(store.backend, read_data=True).ok


def test_unknown_fields_are_taken_and_future_formats_are_not(backend, ledger):
    class Later(Turns, frozen=True, kw_only=True):
        more: int = 1

    given = {name: getattr(turns(), name) for name in Turns.__struct_fields__}
    backend.create("turns/f/0000000001.json", encode_coordination(Later(**given)))
    assert ledger.newest().holds("r1")
    backend.create("turns/f/0000000002.json", encode_coordination(msgspec.structs.replace(turns(2), format=99)))
    with pytest.raises(DeltastoreError, match="format 99"):
        ledger.newest()
