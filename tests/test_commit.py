"""A manifest is published exactly once, whatever becomes of the answers."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltastore.commit import RESENDS, commit, settle
from deltastore.errors import (
    CommitInDoubt,
    DiskFull,
    ObjectExists,
    ObjectNotFound,
    StorageError,
    UsageError,
    VersionConflict,
)
from deltastore.storage.local import LocalBackend
from deltastore.storage.remote import open_fsspec
from deltastore.testing import Effect, Fault, FaultyBackend, oversize, truncate

KEY = "manifests/000007"
OURS = b'{"commit_id": "ours"}'
THEIRS = b'{"commit_id": "theirs"}'
LIMIT = 1 << 16

_names = itertools.count()


@pytest.fixture
def store(tmp_path):
    return LocalBackend(tmp_path)


@pytest.fixture
def backend(store):
    return FaultyBackend(store)


@pytest.fixture
def pauses():
    return []


@pytest.fixture
def commit_ours(backend, pauses):
    return partial(commit, backend, KEY, OURS, limit=LIMIT, sleep=pauses.append)


@pytest.fixture
def settle_ours(backend, pauses):
    return partial(settle, backend, KEY, OURS, limit=LIMIT, sleep=pauses.append)


def operations(backend: FaultyBackend) -> list[str]:
    return [operation for operation, _ in backend.calls]


def test_one_request_when_all_is_well(backend, store, commit_ours):
    commit_ours()
    assert store.read(KEY, limit=LIMIT) == OURS
    assert operations(backend) == ["create"]


def test_another_was_first(backend, store, commit_ours):
    store.create(KEY, THEIRS)
    with pytest.raises(VersionConflict) as caught:
        commit_ours()
    assert caught.value.key == KEY
    assert caught.value.hint
    assert store.read(KEY, limit=LIMIT) == THEIRS
    assert operations(backend) == ["create", "read"]


@pytest.mark.parametrize("kind", [StorageError, ObjectExists])
def test_lost_answer(backend, store, commit_ours, kind):
    backend.add(Fault(operation="create", effect=Effect.AFTER, error=lambda: kind("lost")))
    commit_ours()
    assert store.read(KEY, limit=LIMIT) == OURS
    assert operations(backend) == ["create", "read"]


def test_never_arrived(backend, store, commit_ours):
    backend.add(*[Fault(operation="create")] * RESENDS)
    commit_ours()
    assert store.read(KEY, limit=LIMIT) == OURS
    assert operations(backend) == ["create", "read"] * RESENDS + ["create"]


def test_resends_are_bounded(backend, commit_ours, settle_ours, pauses):
    backend.add(*[Fault(operation="create")] * (RESENDS + 1))
    with pytest.raises(CommitInDoubt, match="connection was lost"):
        commit_ours()
    assert operations(backend) == ["create", "read"] * (RESENDS + 1)
    assert len(pauses) == RESENDS - 1
    settle_ours()
    assert operations(backend)[-2:] == ["read", "create"]


def test_lands_after_it_was_missed(backend, store, commit_ours):
    late = Fault(operation="create", effect=Effect.LATE)
    backend.add(late, Fault(operation="create", effect=Effect.NONE, hook=backend.land))
    commit_ours()
    assert store.read(KEY, limit=LIMIT) == OURS


def test_in_doubt_then_it_landed(backend, store, settle_ours):
    backend.add(Fault(operation="create", effect=Effect.LATE))
    with pytest.raises(CommitInDoubt):
        commit(backend, KEY, OURS, limit=LIMIT, resends=0)
    backend.land()
    settle_ours()
    assert operations(backend) == ["create", "read", "read"]


def test_in_doubt_then_another_came_first(backend, store, settle_ours):
    backend.add(Fault(operation="create", effect=Effect.LATE))
    with pytest.raises(CommitInDoubt):
        commit(backend, KEY, OURS, limit=LIMIT, resends=0)
    store.create(KEY, THEIRS)
    backend.land()
    with pytest.raises(VersionConflict):
        settle_ours()
    assert store.read(KEY, limit=LIMIT) == THEIRS


def test_cannot_be_read_back(backend, store, commit_ours, settle_ours):
    backend.add(Fault(operation="create", effect=Effect.AFTER), Fault(operation="read"))
    with pytest.raises(CommitInDoubt) as caught:
        commit_ours()
    assert isinstance(caught.value.__cause__, StorageError)
    settle_ours()
    assert store.read(KEY, limit=LIMIT) == OURS


@pytest.mark.parametrize(
    "error",
    [partial(StorageError, "denied", transient=False, hint="ask"), partial(DiskFull, "full", hint="ask")],
)
def test_pointless_resends_are_left_out(backend, commit_ours, error):
    backend.add(Fault(operation="create", error=error))
    with pytest.raises(CommitInDoubt) as caught:
        commit_ours()
    assert operations(backend) == ["create", "read"]
    assert caught.value.hint.startswith("ask")


def test_an_object_over_the_limit_is_not_ours(backend, store, commit_ours):
    store.create(KEY, THEIRS * 10_000)
    with pytest.raises(VersionConflict):
        commit_ours()


def test_nothing_over_the_limit_is_sent(backend):
    with pytest.raises(UsageError):
        commit(backend, KEY, OURS, limit=len(OURS) - 1)
    with pytest.raises(UsageError):
        settle(backend, KEY, OURS, limit=len(OURS) - 1)
    assert backend.calls == []


@pytest.mark.parametrize("moment", ["before create", "after create", "read"])
def test_interrupted(backend, store, commit_ours, settle_ours, moment):
    faults = {
        "before create": [Fault(operation="create", error=KeyboardInterrupt)],
        "after create": [Fault(operation="create", effect=Effect.AFTER, error=KeyboardInterrupt)],
        "read": [
            Fault(operation="create", effect=Effect.AFTER),
            Fault(operation="read", error=KeyboardInterrupt),
        ],
    }
    backend.add(*faults[moment])
    with pytest.raises(KeyboardInterrupt):
        commit_ours()
    settle_ours()
    assert store.read(KEY, limit=LIMIT) == OURS


def test_settling_twice_changes_nothing(backend, commit_ours, settle_ours):
    commit_ours()
    settle_ours()
    settle_ours()
    assert operations(backend) == ["create", "read", "read"]


@pytest.mark.parametrize("damage", [truncate, oversize])
def test_damaged_bytes_are_not_taken_for_ours(backend, commit_ours, damage):
    backend.add(
        Fault(operation="create", effect=Effect.AFTER),
        Fault(operation="read", effect=Effect.NONE, damage=damage),
    )
    with pytest.raises(VersionConflict):
        commit_ours()


def test_eight_threads(tmp_path):
    barrier = threading.Barrier(8)

    def publish(number: int, key: str) -> bool:
        barrier.wait()
        try:
            commit(LocalBackend(tmp_path), key, f"writer {number}".encode(), limit=LIMIT)
        except VersionConflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        for turn in range(25):
            key = f"manifests/{turn:06d}"
            won = [*pool.map(publish, range(8), [key] * 8)]
            assert sum(won) == 1
            assert LocalBackend(tmp_path).read(key, limit=LIMIT) == f"writer {won.index(True)}".encode()


# -- two writers, every script of faults ------------------------------------------------------------------


@dataclass
class Publisher:
    """A writer that publishes one manifest, and settles it for as long as it is in doubt."""

    data: bytes
    backend: FaultyBackend
    outcome: str = "not begun"
    resends: int = RESENDS

    def step(self) -> None:
        """Begin, or go on; a decided writer does nothing more."""
        if self.outcome in {"committed", "lost"}:
            return
        action = commit if self.outcome == "not begun" else settle
        # Whatever happens from here on, something may have been sent.
        self.outcome = "in doubt"
        try:
            action(self.backend, KEY, self.data, limit=LIMIT, resends=self.resends, sleep=lambda _: None)
        except VersionConflict:
            self.outcome = "lost"
        except (CommitInDoubt, KeyboardInterrupt):
            pass
        else:
            self.outcome = "committed"


def stored(backend) -> bytes | None:
    try:
        return backend.read(KEY, limit=LIMIT)
    except ObjectNotFound:
        return None


# What happens to one call, and what happens meanwhile: the other writer acts, or late requests arrive.
calls = st.tuples(
    st.sampled_from(["create", "read"]),
    st.sampled_from([Effect.NONE, Effect.BEFORE, Effect.AFTER, Effect.LATE]),
    st.sampled_from(["lost", "exists", "interrupted"]),
    st.sampled_from(["nothing", "other writer", "landing"]),
    st.booleans(),
)
scripts = st.lists(calls, max_size=6)
ERRORS = {
    "lost": lambda: StorageError("lost"),
    "exists": lambda: ObjectExists("exists"),
    "interrupted": KeyboardInterrupt,
}


@settings(max_examples=300, deadline=None)
@given(
    scripts,
    scripts,
    st.lists(st.sampled_from(["first", "second", "land first", "land second"]), max_size=6),
    st.integers(0, 2),
)
def test_exactly_one_of_two_writers_commits(first_script, second_script, steps, resends):
    store = open_fsspec(f"memory://commit-{next(_names)}", storage_options={})
    first = Publisher(OURS, FaultyBackend(store), resends=resends)
    second = Publisher(THEIRS, FaultyBackend(store), resends=resends)
    seen: list[bytes | None] = []

    def observe() -> None:
        seen.append(stored(store))

    def meanwhile(name: str, own: Publisher, other: Publisher) -> None:
        observe()
        if name == "other writer":
            other.step()
        elif name == "landing":
            own.backend.land()
            other.backend.land()
        observe()

    def program(script, own: Publisher, other: Publisher) -> None:
        for operation, effect, error, event, before in script:
            # A read that arrives late answers nobody.
            effect = Effect.BEFORE if operation == "read" and effect is Effect.LATE else effect  # noqa: PLW2901
            error = "lost" if operation == "read" and error == "exists" else error  # noqa: PLW2901
            hook = partial(meanwhile, event, own, other)
            own.backend.add(
                Fault(
                    operation=operation,
                    effect=effect,
                    error=ERRORS[error],
                    hook=hook if before else None,
                    after=None if before else hook,
                )
            )

    program(first_script, first, second)
    # Only one of them acts inside the other's calls: a call never waits for itself.
    program([(*call[:3], "nothing", call[4]) for call in second_script], second, first)
    actions = {
        "first": first.step,
        "second": second.step,
        "land first": first.backend.land,
        "land second": second.backend.land,
    }
    for step in [*steps, "first", "second", "land second", "land first"]:
        actions[step]()
        observe()
    # Every script ends at some time, and then nobody who may send again stays in doubt.
    first.resends = second.resends = RESENDS
    for _ in range(20):
        first.step()
        second.step()
        observe()
    first.backend.land()
    second.backend.land()
    observe()

    assert {first.outcome, second.outcome} == {"committed", "lost"}
    winner = first if first.outcome == "committed" else second
    history = [data for data, _ in itertools.groupby(seen)]
    assert history in ([None, winner.data], [winner.data])
