"""The trainer's side: what may be published, what it becomes, and what failures leave behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import resource
import signal
import threading

import numpy as np
import pytest
import torch
import training

import deltastore.attempt
import deltastore.manifest
import deltastore.writer
from deltastore import Writer, open_checkpoint, open_store
from deltastore.errors import (
    BaseMismatch,
    CommitInDoubt,
    DeltastoreError,
    PublishError,
    StorageError,
    StoreNotFound,
    UsageError,
    VersionConflict,
    WriterFenced,
)
from deltastore.shares import Shares
from deltastore.storage.local import LocalBackend
from deltastore.testing import Effect, Fault, FaultyBackend


@pytest.fixture
def base():
    return training.base_snapshot()


@pytest.fixture
def url(tmp_path, base):
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", base)):
        pass
    return tmp_path / "store"


@pytest.fixture
def faulty(url, monkeypatch):
    backend = FaultyBackend(LocalBackend(url))
    monkeypatch.setattr(deltastore.writer, "open_backend", lambda *_, **__: backend)
    return backend


@pytest.fixture
def holds(url, tmp_path):
    """Fail unless the store's newest version, restored, is this snapshot; returns its manifest."""

    def check(snapshot):
        store = open_store(url)
        newest = store.latest()
        store.restore(newest.version, tmp_path / "restored" / str(newest.version))
        training.assert_holds(tmp_path / "restored" / str(newest.version), snapshot)
        return newest

    return check


def test_an_iterator_may_reuse_one_buffer_for_every_tensor(url, base, holds):
    after = training.step(base, 1)
    buffer = torch.empty(max(training.flat(tensor).numel() for tensor in after.values()), dtype=torch.uint8)

    def stream():
        for name, tensor in after.items():
            part = buffer[: training.flat(tensor).numel()]
            part[:] = training.flat(tensor)
            yield name, part.view(tensor.dtype).reshape(tensor.shape) if tensor.numel() else tensor
            buffer.fill_(0xAB)

    with Writer(url) as writer:
        writer.publish(stream()).result()
    holds(after)


def test_tensors_may_change_as_soon_as_publish_returns(url, base, holds):
    after = training.step(base, 1)
    given = {name: tensor.clone() for name, tensor in after.items()}
    with Writer(url) as writer:
        publication = writer.publish(given)
        for tensor in given.values():
            training.flat(tensor).fill_(0x55)
        publication.result()
        second = training.step(after, 2)
        writer.publish(second).result()
    holds(second)
    open_store(url).restore(1, url.parent / "one")
    training.assert_holds(url.parent / "one", after)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
def test_names_that_wrappers_changed_are_known_again(url, base, holds, prefix):
    after = training.step(base, 1)
    with Writer(url) as writer:
        writer.publish({prefix + name: tensor for name, tensor in after.items()}).result()
    holds(after)


def test_views_strides_parameters_and_arrays_are_published_as_their_values(url, base, holds):
    after = training.step(base, 1)
    given = dict(after)
    name = "model.layers.0.mlp.up_proj.weight"
    given[name] = torch.nn.Parameter(after[name].t().contiguous().t())
    assert not given[name].is_contiguous()
    given["model.ids"] = after["model.ids"].numpy()[::-1][::-1]
    given["model.layers.0.norm.weight"] = np.asfortranarray(after["model.layers.0.norm.weight"].numpy())
    given["model.steps"] = np.array(after["model.steps"].item(), np.float32)
    with Writer(url) as writer:
        writer.publish(given).result()
    holds(after)


def test_an_open_checkpoint_is_published(url, base, tmp_path, holds):
    after = training.step(base, 1)
    with Writer(url) as writer:
        writer.publish(open_checkpoint(training.save(tmp_path / "next", after, shards=3, others=False))).result()
    holds(after)


@pytest.fixture
def tied(tmp_path):
    snapshot = training.small_snapshot(0)
    snapshot["model.embed_tokens.weight"] = snapshot.pop("b.weight")
    with Writer(tmp_path / "tied", base=training.save(tmp_path / "tied-base", snapshot)):
        pass
    return tmp_path / "tied", snapshot


@pytest.mark.parametrize("first", [True, False])
def test_a_tied_head_that_the_base_lacks_is_left_out_if_it_is_equal(tied, first, tmp_path):
    url, snapshot = tied
    after = {name: tensor.clone() for name, tensor in snapshot.items()}
    after["model.embed_tokens.weight"][3] += 1
    head = {"lm_head.weight": after["model.embed_tokens.weight"]}
    with Writer(url) as writer:
        writer.publish(head | after if first else after | head).result()
        with pytest.raises(PublishError) as caught:
            writer.publish(after | {"module.lm_head.weight": after["model.embed_tokens.weight"] + 1})
        assert caught.value.tensors == ("lm_head.weight",)
        with pytest.raises(PublishError):
            writer.publish(after | {"lm_head.weight": torch.zeros(3)})
        assert writer.version == 1
    open_store(url).restore(1, tmp_path / "one")
    training.assert_holds(tmp_path / "one", after)


def bad_tensors(base):
    name = "model.layers.0.norm.weight"
    other = "model.ids"
    without = {key: tensor for key, tensor in base.items() if key not in {name, other}}
    yield "missing", without, {name, other}
    yield "unknown", base | {"model.new": base[name], "extra": base[other]}, {"model.new", "extra"}
    yield "shape", base | {name: base[name].reshape(2, 64)}, {name}
    yield "size", base | {name: base[name][:-1]}, {name}
    yield "dtype", base | {name: base[name].bfloat16(), other: base[other].int()}, {name, other}
    yield (
        "float16 for bfloat16",
        base | {"model.embed_tokens.weight": base["model.embed_tokens.weight"].half()},
        {"model.embed_tokens.weight"},
    )
    yield "twice", [*base.items(), (name, base[name])], {name}
    yield "both names", [*base.items(), ("module." + name, base[name])], {name}
    yield "no tensor", base | {name: [1.0] * 128}, {name}
    yield "none", base | {name: None}, {name}
    yield "sparse", base | {name: base[name].to_sparse()}, {name}
    yield "meta", base | {name: base[name].to("meta")}, {name}
    yield "big-endian", base | {name: base[name].numpy().astype(">f4")}, {name}
    yield "object array", base | {name: np.array([None] * 128)}, {name}
    yield "nothing", {}, set(base)


CASES = [name for name, *_ in bad_tensors(training.base_snapshot())]


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_are_not_the_streams_are_refused_by_name(url, base, holds, case):
    _, given, names = next(entry for entry in bad_tensors(training.step(base, 1)) if entry[0] == case)
    after = training.step(base, 2)
    with Writer(url) as writer:
        with pytest.raises(PublishError) as caught:
            writer.publish(given)
        assert set(caught.value.tensors) == names
        assert all(name in str(caught.value) for name in list(names)[:1]) or len(names) > 5
        assert writer.version == 0
        assert [info.key for info in LocalBackend(url).list("parts/0000000001/")] == []
        writer.publish(after).result()
    assert holds(after).version == 1


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 2000, "\ud800", 7, None, ("a", "b")])
def test_names_that_no_stream_has_are_refused(url, base, name):
    with Writer(url) as writer:
        with pytest.raises(PublishError):
            writer.publish(base | {name: torch.zeros(2)})
        writer.publish(base).result()


def test_an_iterator_that_fails_half_way_publishes_nothing(url, base, holds):
    after = training.step(base, 1)

    def stream():
        yield from list(after.items())[:5]
        raise ZeroDivisionError

    with Writer(url) as writer:
        with pytest.raises(ZeroDivisionError):
            writer.publish(stream())
        writer.publish(after).result()
    assert holds(after).version == 1


def test_metadata_of_every_kind(url, base):
    given = {
        "text": "ü \n",
        "int": 7,
        "big": 2**63 - 1,
        "small": -(2**63),
        "float": 1e-6,
        "true": True,
        "none": None,
        "nan": float("nan"),
        "inf": float("-inf"),
        "numpy": np.float32(0.5),
        "numpy int": np.int64(3),
        "numpy bool": np.bool_(True),
    }
    with Writer(url) as writer:
        writer.publish(base, metadata=given, step=2**40).result()
    manifest = open_store(url).latest()
    wanted = given | {"nan": "nan", "inf": "-inf", "numpy": 0.5, "numpy int": 3, "numpy bool": True}
    assert manifest.metadata == wanted
    assert manifest.step == 2**40


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": [1]},
        {"a": {}},
        {"a": b""},
        {1: "a"},
        {"a": 2**63},
        {"a": "x" * 70_000},
        {"a": torch.ones(1)},
        {"a": "\ud800"},
        {"\ud800": 1},
    ],
    ids=str,
)
def test_metadata_that_cannot_be_kept_is_refused(url, base, metadata):
    with Writer(url) as writer:
        with pytest.raises(PublishError):
            writer.publish(base, metadata=metadata)
        writer.publish(base).result()
    assert open_store(url).log()[-1].version == 1


@pytest.mark.parametrize("step", [2**62 + 1, -(2**63), 2**64, 1.5, "7", True, float("nan")])
def test_a_step_that_no_reader_would_take_is_refused(url, base, step):
    with Writer(url) as writer:
        with pytest.raises(PublishError):
            writer.publish(base, step=step)
        writer.publish(base, step=np.int64(5)).result()
    assert [manifest.step for manifest in open_store(url).log()] == [None, 5]


def test_a_result_can_be_waited_for_with_a_limit(url, base, faulty):
    go = threading.Event()
    faulty.add(Fault(operation="create", effect=Effect.NONE, hook=lambda: go.wait(30)))
    with Writer("here") as writer:
        publication = writer.publish(training.step(base, 1))
        with pytest.raises(concurrent.futures.TimeoutError):
            publication.result(timeout=0.01)
        assert not publication.done()
        go.set()
        assert publication.result(timeout=30).version == publication.version == 1
        assert publication.done()
        assert set(publication.result().timings) == {"encode", "upload", "commit", "advance", "total"}


def test_a_second_publish_waits_for_the_first(url, base, faulty, holds):
    first, second = training.step(base, 1), training.step(base, 2)
    arrived, go = threading.Event(), threading.Event()
    faulty.add(Fault(operation="create", effect=Effect.NONE, hook=lambda: (arrived.set(), go.wait(30))))
    with Writer("here") as writer:
        one = writer.publish(first)
        arrived.wait(30)
        threading.Timer(0.05, go.set).start()
        two = writer.publish(second)
        assert one.done()
        assert (one.result().version, two.result().version) == (1, 2)
    assert holds(second).version == 2


def test_an_interrupted_wait_for_the_version_in_flight_begins_nothing(url, base, faulty, holds, monkeypatch):
    first, second = training.step(base, 1), training.step(base, 2)
    arrived, go = threading.Event(), threading.Event()
    faulty.add(Fault(operation="create", effect=Effect.NONE, hook=lambda: (arrived.set(), go.wait(30))))
    with Writer("here") as writer:
        one = writer.publish(first)
        arrived.wait(30)

        def interrupted(self, timeout=None):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(concurrent.futures.Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.publish(second)
        assert not one.done()
        go.set()
        writer.publish(second).result()
        assert one.result().version == 1
    assert holds(second).version == 2


@pytest.mark.parametrize("moment", ["before a thread has it", "before it runs", "after it ran"])
def test_an_interrupt_while_work_is_handed_to_a_thread_leaves_nothing_behind(url, base, holds, monkeypatch, moment):
    monkeypatch.setattr(Shares, "size", 1000)
    first, second = training.step(base, 1), training.step(base, 2)
    go, ended = threading.Event(), threading.Event()
    calls = itertools.count(1)
    with Writer(url) as writer:
        submit = writer._encoders.submit

        def interrupted(*work):
            if next(calls) != 3:
                return submit(*work)

            def late():
                assert go.wait(60)
                submit(*work).result()
                ended.set()

            if moment == "before it runs":
                threading.Thread(target=late).start()
            else:
                ended.set()
                if moment == "after it ran":
                    submit(*work).result()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(writer._encoders, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.publish(first)
        go.set()
        assert ended.wait(60)
        assert writer.publish(second).result().version == 1
    assert holds(second).version == 1


@pytest.mark.parametrize("what", ["publish", "close"])
@pytest.mark.parametrize("caught", [True, False])
def test_a_call_in_the_middle_of_a_publish_is_refused_and_changes_nothing(url, base, holds, monkeypatch, what, caught):
    monkeypatch.setattr(Shares, "size", 1000)
    first, second, third = (training.step(base, number) for number in (1, 2, 3))

    def stream(writer):
        for number, pair in enumerate(first.items()):
            if number == len(first) // 2:
                with pytest.raises(PublishError, match="publishing") if caught else contextlib.nullcontext():
                    writer.publish(second) if what == "publish" else writer.close()
            yield pair

    with Writer(url) as writer:
        if caught:
            writer.publish(stream(writer)).result()
            assert holds(first).version == 1
        else:
            with pytest.raises(PublishError, match="publishing"):
                writer.publish(stream(writer))
        writer.publish(third).result()
    assert holds(third).version == 1 + caught


def test_a_closed_writer_publishes_nothing_more(url, base):
    with Writer(url) as writer:
        publication = writer.publish(training.step(base, 1))
    assert publication.result().version == 1
    writer.close()
    with pytest.raises(PublishError, match="closed"):
        writer.publish(base)
    assert writer.version == 1


@pytest.mark.parametrize("ending", ["closes", "publishes", "exits"])
def test_a_child_that_is_forked_in_the_middle_of_a_publish_disturbs_nothing(url, base, holds, monkeypatch, ending):
    monkeypatch.setattr(deltastore.attempt, "_MEMORY_BYTES", 0)  # parts wait in the spool
    monkeypatch.setattr(deltastore.attempt, "_PART_ROWS", 1)
    first, second = training.step(base, 1), training.step(base, 2)

    def forking(writer):
        for number, pair in enumerate(first.items()):
            if number == 6:
                child = os.fork()
                if not child:
                    _end(writer, base, ending)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            yield pair

    with Writer(url) as writer:
        assert writer.publish(forking(writer)).result().version == 1
        holds(first)
        writer.publish(second).result()
    holds(second)


def _end(writer, snapshot, ending):
    """End this process as a child does that has its parent's writer; with a signal if it hangs."""
    signal.setitimer(signal.ITIMER_REAL, 60)
    writer._publishing = False  # the child's own call, later
    try:
        if ending == "closes":
            writer.close()
        elif ending == "publishes":
            with pytest.raises(PublishError, match="forked"):
                writer.publish(snapshot)
        writer._spool.close()
        writer._spool._left()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("operation", ["write", "create"])
def test_a_failing_store_leaves_the_next_publish_right(url, base, faulty, holds, operation):
    first, second = training.step(base, 1), training.step(base, 5)
    error = lambda: StorageError("denied", transient=False, hint="ask")  # noqa: E731 - a fault's maker
    with Writer("here") as writer:
        key = "parts/" if operation == "write" else "manifests/"
        faulty.add(Fault(operation=operation, key_prefix=key, error=error))
        with pytest.raises((StorageError, CommitInDoubt)):
            writer.publish(first).result()
        published = writer.publish(second).result()
    # A commit in doubt is settled by sending it again.
    assert published.version == (1 if operation == "write" else 2)
    holds(second)


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "given up"])
def test_a_version_of_more_spooled_parts_than_there_are_descriptors_is_followed(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(deltastore.attempt, "_MEMORY_BYTES", 0)
    generator = torch.Generator().manual_seed(1)
    names = [f"layers.{number:03}.weight" for number in range(120)]
    before = {name: torch.randn(5000, generator=generator) for name in names}
    # Whole chunks, which the shadow follows at the end; or a few elements, which are taken back.
    after = {name: -2 * tensor for name, tensor in before.items()}
    if fails:
        after = {name: tensor.clone().index_fill_(0, torch.tensor([7]), 1.5) for name, tensor in before.items()}
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Writer(tmp_path / "store", base=training.save(tmp_path / "base", before), workers=1) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(deltastore.attempt, "_PART_ROWS", 1)
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 40, most))
            try:
                if fails:
                    with pytest.raises(PublishError, match="missing"):
                        writer.publish(dict(list(after.items())[:-1]))
                else:
                    writer.publish(after).result()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        after = {name: tensor + 1 for name, tensor in after.items()}
        assert writer.publish(after).result().version == 2 - fails
    open_store(tmp_path / "store").restore(2 - fails, tmp_path / "restored")
    training.assert_holds(tmp_path / "restored", after)


def test_a_version_of_too_many_parts_is_refused_and_leaves_the_next_publish_right(url, base, holds, monkeypatch):
    first, second = training.step(base, 1), training.step(base, 2)
    with Writer(url) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(deltastore.attempt, "_PART_ROWS", 1)
            patch.setattr(deltastore.manifest, "MAX_MANIFEST_BYTES", 2000)
            patch.setattr(deltastore.writer, "MAX_MANIFEST_BYTES", 2000)
            with pytest.raises(UsageError, match="2000"):
                writer.publish(first).result()
        assert not list((url / "parts").glob("0000000001/*/*"))
        assert writer.publish(second).result().version == 1
    holds(second)


def test_a_commit_in_doubt_that_another_writer_overtook_is_a_conflict(url, base, faulty, holds):
    first, second = training.step(base, 1), training.step(base, 2)
    error = lambda: StorageError("denied", transient=False, hint="ask")  # noqa: E731 - a fault's maker
    late = Writer("here")
    faulty.add(Fault(operation="create", effect=Effect.LATE, key_prefix="manifests/", error=error))
    with pytest.raises(CommitInDoubt):
        late.publish(first).result()
    with Writer("here") as other:
        other.publish(second).result()
    faulty.land()
    with pytest.raises(VersionConflict):
        late.publish(second)
    with pytest.raises(WriterFenced):
        late.publish(second)
    late.close()
    assert holds(second).version == 1


def test_closing_settles_what_is_in_doubt(url, base, faulty, holds):
    after = training.step(base, 1)
    error = lambda: StorageError("denied", transient=False, hint="ask")  # noqa: E731 - a fault's maker
    writer = Writer("here")
    faulty.add(Fault(operation="create", key_prefix="manifests/", error=error))
    with pytest.raises(CommitInDoubt):
        writer.publish(after).result()
    writer.close()
    assert holds(after).version == 1


def test_closing_while_in_doubt_says_so(url, base, faulty):
    error = lambda: StorageError("denied", transient=False, hint="ask")  # noqa: E731 - a fault's maker
    writer = Writer("here")
    faulty.add(*[Fault(operation="create", key_prefix="manifests/", error=error)] * 2)
    with pytest.raises(CommitInDoubt):
        writer.publish(training.step(base, 1)).result()
    with pytest.raises(CommitInDoubt):
        writer.close()
    assert open_store(url).latest().version == 0


def test_nothing_is_left_on_disk_after_closing(url, base, tmp_path):
    spool = tmp_path / "spool"
    spool.mkdir()
    with Writer(url, spool=spool) as writer:
        writer.publish(training.step(base, 1)).result()
    assert list(spool.iterdir()) == []


def test_what_a_writer_cannot_start_from_is_told(url, base, tmp_path):
    with pytest.raises(StoreNotFound):
        Writer(tmp_path / "nowhere")
    wrong = training.save(tmp_path / "wrong", base | {"model.ids": base["model.ids"] + 1})
    with pytest.raises(BaseMismatch) as caught:
        Writer(url, base=wrong)
    assert caught.value.tensors == ("model.ids",)
    with pytest.raises(DeltastoreError):
        Writer(url, base=tmp_path / "missing")
    with pytest.raises(UsageError):
        Writer(url, level="best")


def test_a_writer_starts_from_any_version_and_goes_on_after_the_newest(url, base, tmp_path, holds):
    snapshots = [base]
    with Writer(url) as writer:
        for number in (1, 2):
            snapshots.append(training.step(snapshots[-1], number))
            writer.publish(snapshots[-1]).result()
    for start in (2, 1, 0):
        after = training.step(snapshots[-1], 10 + start)
        with Writer(url, base=training.save(tmp_path / f"start{start}", snapshots[start], shards=2)) as writer:
            assert writer.version == len(snapshots) - 1
            writer.publish(after).result()
        snapshots.append(after)
        assert holds(after).version == len(snapshots) - 1
    assert [manifest.writer_epoch for manifest in open_store(url).log()] == [1, 2, 2, 3, 4, 5]


@pytest.mark.parametrize("where", ["_sent", "committer", "settle", "after the commit"])
def test_an_interruption_anywhere_leaves_the_next_publish_right(url, base, faulty, holds, monkeypatch, where):
    first, second = training.step(base, 1), training.step(base, 4)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with Writer("here") as writer:
        if where in {"settle", "after the commit"}:
            error = lambda: StorageError("denied", transient=False, hint="ask")  # noqa: E731 - a fault's maker
            faulty.add(Fault(operation="create", key_prefix="manifests/", error=error))
            with pytest.raises(CommitInDoubt):
                writer.publish(first).result()
        with monkeypatch.context() as patch:
            if where == "_sent":
                patch.setattr(writer, "_sent", interrupt)
            elif where == "committer":
                settled = writer._settle
                patch.setattr(
                    writer, "_settle", lambda: (settled(), patch.setattr(writer._committer, "submit", interrupt))
                )
            elif where == "settle":
                patch.setattr(deltastore.writer, "settle", interrupt)
            else:
                patch.setattr(writer, "_advance", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.publish(first)
        published = writer.publish(second).result()
    assert published.version == (1 if where in {"_sent", "committer"} else 2)
    holds(second)
    keys = {info.key for info in LocalBackend(url).list("parts/")}
    assert keys >= {part.key for manifest in open_store(url).log() for part in manifest.model.parts}


def test_a_shadow_that_cannot_go_back_fences_its_writer(url, base, faulty, holds, monkeypatch):
    with Writer("here") as writer:
        faulty.add(Fault(operation="write", key_prefix="parts/", error=lambda: StorageError("denied", hint="ask")))

        def lost(*_, **__):
            raise MemoryError

        monkeypatch.setattr(writer._shadow, "take_back", lost)
        with pytest.raises(MemoryError):
            writer.publish(training.step(base, 1)).result()
        with pytest.raises(WriterFenced, match="shadow is lost"):
            writer.publish(training.step(base, 2))
    with Writer("here") as writer:
        writer.publish(training.step(base, 2)).result()
    assert holds(training.step(base, 2)).version == 1
