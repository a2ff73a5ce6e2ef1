"""Publishing: each new snapshot is compared with the shadow, encoded, uploaded, committed; then the shadow follows.

A version that fails, is in doubt, or loses to another writer leaves the next one compared with the last *committed*
snapshot: the shadow, ahead of the store while a version is on its way, is led back, or its writer is fenced.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from .anchoring import Anchoring
from .attempt import Attempt, upload_pool
from .checkpoint import Checkpoint, open_checkpoint
from .clock import now
from .codec import LEVELS
from .codec.chunk import warm_up
from .codec.taking import warm_up_taking
from .commit import commit, settle
from .digest import DEFAULT_HASH
from .errors import (
    CommitInDoubt,
    DeltastoreError,
    PublishError,
    StorageError,
    StoreNotFound,
    UsageError,
    VersionConflict,
    WriterFenced,
)
from .fields import checked_metadata, checked_step
from .init import create_stream
from .intake import Intake
from .manifest import (
    FORMAT,
    LATEST_KEY,
    MAX_MANIFEST_BYTES,
    MODEL,
    Component,
    LatestHint,
    Manifest,
    anchor_policy,
    encode_latest,
    encode_manifest,
    manifest_key,
    parse_manifest,
)
from .patch import default_workers
from .planner import Planner
from .publication import Publication, Published
from .reader import store_at
from .restore import identify
from .resume import take_weights
from .shadow import Shadow
from .signing import SIGNED, Signer, load_public_keys
from .snapshot import snapshot_id
from .spool import TemporarySpool
from .storage import close_backend, open_backend
from .tensors import checkpoint_tensors, named_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from .manifest import AnchorPolicy, Scalar
    from .reader import Store
    from .snapshot import Digests

__all__ = ["Writer"]


class _Begun(NamedTuple):
    """An attempt that the shadow is ahead for."""

    attempt: Attempt
    intake: Intake


@dataclass(frozen=True, slots=True)
class _Sent:
    """A manifest with all that its commit needs, ready to be sent or in doubt."""

    manifest: Manifest
    data: bytes
    attempt: Attempt
    digests: Digests


class Writer:
    """Publishes the versions of one stream. One writer a stream at a time; one version in flight.

    ``url`` is a path or any fsspec URL of a backend that this release knows. Where there is no stream yet, one is
    made from ``base``, a checkpoint directory (``hash_name``, ``upload_base``, and the anchor policy ``anchor_every``
    and ``anchor_when`` hold for that). Where there is one, the writer goes on after its newest version, with the next
    epoch; ``base`` then is any checkpoint of the stream, or ``None`` to take the store's anchor. Memory: one snapshot,
    a few dozen chunks, 64 MiB of encoded parts; further parts wait on disk in ``spool`` (the system's temporary
    directory unless given).

    ``anchors``: make the anchors that the stream's policy asks for, from the shadow, behind the commits; the next
    version is encoded and committed meanwhile, but its ``result()`` waits until the anchor is made and the shadow may
    advance.

    ``resume`` says that there must be a stream: none is ever made. With it, ``weights`` may stand for ``base``: what
    the trainer has loaded, a state dict or pairs as for ``publish``, proven by its hash to be a version of the stream.
    ``takeover`` is for when the writer before may still be alive: before anything is loaded an empty version is
    committed with the next epoch, so that its next publish loses. If it is faster, this raises ``VersionConflict``,
    and may be tried again.

    ``sign_key`` is a file with a private key: a stream that is made is signed, and one that is signed needs it. Such a
    writer goes on only after what it signed itself, or one of ``trusted_keys`` (as for ``open_store``).

    Raises ``BaseMismatch`` when ``base`` or ``weights`` are no version of the stream, ``StoreNotFound`` when there is
    neither stream nor base. Not for several threads at once.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        base: str | Path | None = None,
        resume: bool = False,
        weights: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        takeover: bool = False,
        level: str = "fast",
        hash_name: str = DEFAULT_HASH,
        upload_base: bool = True,
        anchors: bool = False,
        anchor_every: int | None = None,
        anchor_when: float | None = None,
        sign_key: str | Path | None = None,
        trusted_keys: Iterable[str | Path] | None = None,
        storage_options: Mapping[str, object] | None = None,
        workers: int | None = None,
        spool: str | Path | None = None,
        progress: Callable[[str, int, int], object] | None = None,
    ) -> None:
        if level not in LEVELS:
            raise UsageError(f"There is no level {level!r}.", hint=f"Use one of {', '.join(LEVELS)}.")
        if (takeover or weights is not None) and not resume:
            raise UsageError("Only a stream that is there can be gone on with.", hint="Give resume=True too.")
        if weights is not None and base is not None:
            raise UsageError("Both weights and a base are given.", hint="Give one of them: either is enough.")
        self._signer = Signer.load(sign_key) if sign_key is not None else None
        trusted = load_public_keys(trusted_keys) if trusted_keys is not None else None
        if trusted is None and self._signer is not None:
            trusted = frozenset({self._signer.public_key})
        self._backend = open_backend(str(url), storage_options=storage_options)
        self._workers = workers or default_workers()
        self._progress = progress
        self._spool = TemporarySpool(spool)
        self._begun: _Begun | None = None
        self._doubt: _Sent | None = None
        self._fenced: DeltastoreError | None = None
        self._closed = False
        self._owner = os.getpid()
        self._publishing = False
        self._anchoring: Anchoring | None = None
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._encoders = ThreadPoolExecutor(self._workers, thread_name_prefix="encode")
        self._uploaders = upload_pool()
        try:
            policy = anchor_policy(anchor_every, anchor_when)
            try:
                self.store = store_at(self._backend, trusted_keys=trusted)
            except StoreNotFound:
                if base is None or resume:
                    raise
                self.store = self._create(base, hash_name=hash_name, upload_base=upload_base, policy=policy)
            self._check_signer()
            self._open(base, weights, level=level, takeover=takeover)
            if anchors:
                self._anchoring = Anchoring(self.store, self._shadow, self._spool, workers=self._workers)
        except BaseException:
            self._release()
            raise

    def _create(self, base: str | Path, *, hash_name: str, upload_base: bool, policy: AnchorPolicy | None) -> Store:
        return create_stream(
            self._backend,
            open_checkpoint(base),
            hash_name=hash_name,
            upload_base=upload_base,
            anchors=policy,
            signer=self._signer,
            workers=self._workers,
            spool=self._spool.directory,
            progress=self._progress,
        )

    def _check_signer(self) -> None:
        signers = self.store.stream.signers
        if signers and (self._signer is None or self._signer.public_key not in signers):
            whose = "no key is given" if self._signer is None else f"{self._signer.public_key} is none of its signers"
            raise UsageError(
                f"The stream is signed, and {whose}.", key=self._backend.url, hint="Give the key of one of its signers."
            )

    def _open(
        self,
        base: str | Path | None,
        weights: Mapping[str, Any] | Iterable[tuple[str, Any]] | None,
        *,
        level: str,
        takeover: bool,
    ) -> None:
        self._schema = self.store.schema()
        self._shadow = Shadow(self._schema, self.store.hash, level=level)
        source, start = None, None
        if base is not None:
            source = identify(self.store, base, workers=self._workers, progress=self._progress)
            start = source.version
        elif weights is not None:
            start = take_weights(self.store, self._shadow, weights, workers=self._workers).version
        self._head = self.store.latest()
        self._epoch = self._head.writer_epoch + 1
        if takeover:
            self._take_over()
        planner = Planner(self.store)
        plan = planner.plan(start, self._head.version)
        planner.follow(plan, lambda way: self._shadow.load(self.store, way, source, self._spool, workers=self._workers))
        self._spool.clear()
        warm_up(spec.width for spec in self._schema)
        warm_up_taking((spec.width for spec in self._schema), level)

    def _take_over(self) -> None:
        """Commit a version that changes nothing: the writer before loses from now on, however long loading takes."""
        attempt = self._attempt()
        unchanged = msgspec.structs.replace(
            self._head.model, changed_elements=0, parts=(), invertible=True, digests=None
        )
        sent = self._sent(attempt, unchanged, self._shadow.digests, step=None, metadata={})
        attempt.wait_uploaded()
        self._send(commit, sent)
        self._head = sent.manifest
        self._doubt = None
        self._hint()

    # Publishing

    @property
    def version(self) -> int:
        """The newest version that this writer knows to be committed."""
        return self._head.version

    @property
    def head(self) -> Manifest:
        """That version's manifest."""
        return self._head

    @property
    def anchor_error(self) -> BaseException | None:
        """What the newest anchor that was begun failed with; an anchor's failure never fails a publish."""
        return self._anchoring.error if self._anchoring is not None else None

    def publish(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]] | Checkpoint,
        *,
        step: int | None = None,
        metadata: Mapping[str, Scalar] | None = None,
    ) -> Publication:
        """Publish one snapshot as the next version: a state dict, (name, tensor) pairs, or an open checkpoint.

        Returns when the tensors may change again; ``.result()`` blocks until the version is committed. Pairs are
        taken one at a time: an iterator may reuse a tensor's memory once the next one is asked for. Every tensor of
        the stream must be there with its own dtype and shape. Raises ``PublishError`` naming the tensors otherwise,
        ``WriterFenced`` after a lost race, ``CommitInDoubt`` while an earlier version's fate is still unknown;
        nothing is published then. While it runs, another call of the writer (out of the iterator, a signal's handler,
        another thread) is a ``PublishError`` too.
        """
        self._check_idle()
        try:
            self._publishing = True
            return self._publish(tensors, step, metadata)
        finally:
            self._publishing = False

    def _check_idle(self) -> None:
        # No lock: a handler that comes between this and what follows runs to its end before it.
        if self._publishing:
            raise PublishError("The writer is publishing.", hint="Call it again when `publish` has returned.")

    def _publish(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]] | Checkpoint,
        step: int | None,
        metadata: Mapping[str, Scalar] | None,
    ) -> Publication:
        self._settle()
        started = time.perf_counter()
        fields = checked_metadata(metadata or {})
        count = checked_step(step)
        self._shadow.held = self._anchoring is not None and self._anchoring.busy
        attempt = self._attempt()
        intake = Intake(self._schema, self._shadow, attempt, pool=self._encoders, workers=self._workers)
        # From here on the shadow is ahead, until the attempt is committed or given up: whatever interrupts this.
        self._begun = _Begun(attempt, intake)
        try:
            attempt.begin(MODEL, self._schema)
            if isinstance(tensors, Checkpoint):
                intake.take(checkpoint_tensors(tensors), reusable=True)
            else:
                reusable = isinstance(tensors, Mapping)
                intake.take(named_tensors(tensors, self._schema), reusable=reusable)
            digests = intake.finish()
            component = Component(
                snapshot_id=snapshot_id(self._schema, digests, self.store.hash),
                snapshot_bytes=self._schema.nbytes,
                total_elements=self._schema.elements,
                changed_elements=intake.changed_elements,
                parts=attempt.end(),
                invertible=intake.invertible,
            )
            sent = self._sent(attempt, component, digests, step=count, metadata=fields)
            encoded = time.perf_counter()
        except BaseException:
            self._give_up()
            raise
        return Publication(sent.manifest.version, self._committer.submit(self._finish, sent, started, encoded))

    def _attempt(self) -> Attempt:
        return Attempt(
            self._backend,
            self._spool,
            stream_id=self.store.stream_id,
            version=self._head.version + 1,
            hash_function=self.store.hash,
            pool=self._uploaders,
        )

    def _sent(
        self,
        attempt: Attempt,
        component: Component,
        digests: Digests,
        *,
        step: int | None,
        metadata: dict[str, Scalar],
    ) -> _Sent:
        manifest = Manifest(
            format=FORMAT,
            stream_id=self.store.stream_id,
            version=attempt.version,
            kind="delta",
            commit_id=secrets.token_hex(16),
            attempt_id=attempt.attempt_id,
            writer_epoch=self._epoch,
            created_at=now(),
            parent_version=self._head.version,
            parent_commit_id=self._head.commit_id,
            parent_snapshot_id=self._head.snapshot_id,
            step=step,
            metadata=metadata,
            components={MODEL: component},
            required_features=(SIGNED,) if self._signer is not None else (),
        )
        data = encode_manifest(manifest, hash_function=self.store.hash, signer=self._signer)
        # What no reader would take must not be committed.
        parse_manifest(data, version=manifest.version, verifier=self.store.verifier)
        return _Sent(manifest, data, attempt, digests)

    def _finish(self, sent: _Sent, started: float, encoded: float) -> Published:
        """Upload, commit, advance; runs behind ``publish``."""
        try:
            sent.attempt.wait_uploaded()
        except BaseException:
            self._give_up()
            raise
        uploaded = time.perf_counter()
        self._send(commit, sent)
        committed = time.perf_counter()
        self._advance(sent)
        ended = time.perf_counter()
        model = sent.manifest.model
        return Published(
            version=sent.manifest.version,
            snapshot_id=model.snapshot_id,
            stored_bytes=sent.manifest.stored_bytes,
            changed_elements=model.changed_elements,
            total_elements=model.total_elements,
            timings={
                "encode": encoded - started,
                "upload": uploaded - encoded,
                "commit": committed - uploaded,
                "advance": ended - committed,
                "total": ended - started,
            },
        )

    def _send(self, how: Callable[..., object], sent: _Sent) -> None:
        """Send or settle a manifest; afterwards it is committed, lost (and we are fenced), or unknown."""
        # In doubt until the shadow has followed: whatever interrupts this, the next publish settles it first.
        self._doubt = sent
        try:
            how(self._backend, manifest_key(sent.manifest.version), sent.data, limit=MAX_MANIFEST_BYTES)
        except VersionConflict as error:
            self._fenced = error
            self._doubt = self._begun = None
            sent.attempt.abandon()
            raise

    def _advance(self, sent: _Sent) -> None:
        if self._anchoring is not None:
            self._anchoring.wait()
        with self._sure_of_shadow():
            self._shadow.advance(lambda: sent.attempt.parts(self._schema), sent.digests, workers=self._workers)
            self._head = sent.manifest
            self._begun = self._doubt = None
        sent.attempt.drop()
        self._hint()
        if self._anchoring is not None:
            self._anchoring.follow(sent.manifest)

    def _hint(self) -> None:
        hint = encode_latest(LatestHint(self.store.stream_id, self._head.version))
        with suppress(StorageError):  # a hint only: readers find the version without it
            self._backend.write(LATEST_KEY, hint)

    def _give_up(self) -> None:
        """Abandon the attempt that was begun, whose manifest was never sent, and make the shadow follow."""
        if self._begun is None:
            return
        attempt, intake = self._begun
        with self._sure_of_shadow():
            intake.leave()
            self._shadow.take_back(attempt.parts(self._schema), workers=self._workers)
            self._begun = None
        attempt.abandon()

    @contextmanager
    def _sure_of_shadow(self) -> Iterator[None]:
        """Fence this writer unless the block ends well: only a fresh one knows the last committed version then."""
        try:
            yield
        except BaseException as error:
            self._fenced = (
                error if isinstance(error, DeltastoreError) else PublishError(f"The shadow is lost: {error!r}")
            )
            self._begun = self._doubt = None
            raise

    def _settle(self) -> None:
        """Wait for the version in flight and settle one in doubt; raise if this writer may not publish."""
        if self._closed:
            raise PublishError("The writer is closed.", hint="Open a new one.")
        if self._owner != os.getpid():
            raise PublishError("The writer belongs to the process that this one was forked from.")
        # One thread commits: when it comes to this, the version in flight is done. Its own publication tells its fate;
        # what matters here is how we stand now. An interruption of the wait is raised, and nothing is begun.
        self._committer.submit(_nothing).result()
        if self._doubt is not None:
            doubt = self._doubt
            self._send(settle, doubt)
            self._advance(doubt)
        elif self._fenced is None:
            self._give_up()  # one that an interruption kept from being committed
        if self._fenced is not None:
            raise WriterFenced(
                f"This writer is fenced: {self._fenced}", key=self._fenced.key, hint="Open a new writer."
            ) from self._fenced

    # Lifetime

    def close(self) -> None:
        """Wait for the version in flight, settle one in doubt, and free memory and disk.

        Raises ``CommitInDoubt`` if it stays so. Does nothing in a process that was forked from the writer's own: its
        threads, which all of this waits for, are not there.
        """
        if self._closed or self._owner != os.getpid():
            return
        self._check_idle()
        try:
            with suppress(WriterFenced, VersionConflict):  # told by the publication that lost
                self._settle()
        finally:
            self._release()

    def _release(self) -> None:
        self._closed = True
        self._committer.shutdown()
        self._encoders.shutdown()
        self._uploaders.shutdown()
        if self._anchoring is not None:
            self._anchoring.close()
        self._spool.close()
        close_backend(self._backend)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CommitInDoubt:
            if error is None:
                raise


def _nothing() -> None:
    pass
