"""What every engine adapter has to do, as a suite to subclass.

::

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def engine(self): ...

        @pytest.fixture
        def checkpoints(self): ...

Needs pytest, and nothing of this project's own tests.
"""

# ruff: noqa: S101 (asserts are what a suite is made of)

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Protocol

import pytest

from deltastore.errors import DrainTimeout, EngineError
from receiver.engines.base import EngineInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from receiver.engines.base import Engine, Probe

__all__ = ["EngineContract", "RunningRequest"]

_SECONDS = 60.0


class RunningRequest(Protocol):
    """A request that the engine works at. Times are in seconds."""

    @property
    def tokens(self) -> Sequence[object]:
        """What was generated so far."""
        ...

    def reach(self, count: int, *, timeout: float = _SECONDS) -> bool:
        """Wait until so many tokens are here; tell whether they came."""
        ...

    def finish(self) -> None:
        """Bring it to its end soon, by itself (nothing has to be done where it has few tokens left)."""
        ...

    def outcome(self, *, timeout: float = _SECONDS) -> str | None:
        """Wait for its end: ``length`` or ``stop`` where it came by itself, ``abort`` where the engine ended it."""
        ...


class EngineContract:
    """Subclass it, name the subclass ``Test…`` and give it the two fixtures.

    With ``start_request`` what becomes of running requests is tested too. An adapter that has no engine behind it, and
    so nothing that could refuse, sets ``checks`` to ``False``; one that cannot run a prompt sets ``probes`` so.
    """

    checks = True
    """Whether the engine notices what is wrong: a load without a pause, a bad checkpoint, another version."""

    probes = True
    """Whether the engine has a probe."""

    version_at_first: str | None = None
    """What the engine that the suite is given is at. One that is held until its first version comes with one."""

    @pytest.fixture
    def engine(self) -> Engine:
        """Give an engine that generates, and that nothing was loaded into yet but ``version_at_first``."""
        raise NotImplementedError

    @pytest.fixture
    def checkpoints(self) -> Sequence[Path]:
        """Give two complete checkpoints of the engine's model with different weights."""
        raise NotImplementedError

    @pytest.fixture
    def bad_checkpoint(self, tmp_path: Path) -> Path:
        """Give a directory the engine cannot load; an empty one unless overridden."""
        empty = tmp_path / "bad"
        empty.mkdir()
        return empty

    @pytest.fixture
    def start_request(self) -> Callable[[], RunningRequest]:
        """Give a function that starts a request which runs for at least some seconds, and returns it running."""
        pytest.skip("this suite was given no way to start a request")

    def test_a_fresh_engine_has_an_incarnation_and_is_not_paused(self, engine: Engine) -> None:
        """What the receiver sees of an engine that has just started."""
        info = engine.info()
        assert isinstance(info, EngineInfo)
        assert info.incarnation
        assert (info.version, info.paused) == (self.version_at_first, False)

    def test_an_activation_ends_at_the_version(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """Pause, load, confirm, resume, twice; the incarnation stays."""
        before = engine.info().incarnation
        for version, checkpoint in zip(("stream/7", "stream/8"), checkpoints, strict=True):
            engine.pause()
            assert engine.info().paused
            engine.load(checkpoint, version=version)
            assert engine.info().paused
            engine.confirm(version)
            engine.resume()
            assert engine.info() == EngineInfo(before, version, paused=False)

    def test_going_back_is_a_load_like_any_other(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """A rollback inside one pause."""
        engine.pause()
        for version, checkpoint in (("s/1", checkpoints[0]), ("s/2", checkpoints[1]), ("s/1", checkpoints[0])):
            engine.load(checkpoint, version=version)
        engine.confirm("s/1")
        engine.resume()
        assert engine.info().version == "s/1"

    def test_caches_are_kept_where_that_is_asked_for(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """It is the receiver that decides whether that may be."""
        engine.pause("keep")
        engine.load(checkpoints[0], version="s/1", keep_kv=True)
        engine.confirm("s/1")
        engine.resume()
        assert engine.info().version == "s/1"

    def test_pause_and_resume_may_be_repeated(self, engine: Engine) -> None:
        """A receiver that does not know how far the last one came starts over, and with another mode perhaps."""
        engine.resume()
        engine.pause("keep")
        engine.pause("abort")
        engine.pause("wait", timeout=_SECONDS)
        assert engine.info().paused
        engine.resume()
        engine.resume()
        assert not engine.info().paused

    def test_closing_twice_is_no_error(self, engine: Engine) -> None:
        """Closing belongs into ``finally`` blocks."""
        engine.close()
        engine.close()

    def test_other_threads_may_ask_at_any_time(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """The status page asks while the activation runs; it sees one of the states there are."""
        before = engine.info().incarnation
        engine.pause()
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(engine.info) for _ in range(20)]
            engine.load(checkpoints[0], version="s/3")
            answers = [future.result() for future in asked]
        assert {info.version for info in answers} <= {self.version_at_first, None, "s/3"}
        assert {info.incarnation for info in answers} == {before}
        engine.resume()

    def test_loading_without_a_pause_is_refused(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """Forward passes would see mixed weights."""
        self._only_if_it_checks()
        with pytest.raises(EngineError):
            engine.load(checkpoints[0], version="s/1")
        assert engine.info().version == self.version_at_first

    def test_a_failed_load_leaves_it_paused_without_a_version(
        self, engine: Engine, checkpoints: Sequence[Path], bad_checkpoint: Path
    ) -> None:
        """Nothing is known of the weights then: nothing is confirmed or resumed until a load succeeds."""
        self._only_if_it_checks()
        engine.pause()
        engine.load(checkpoints[0], version="s/1")
        with pytest.raises(EngineError) as caught:
            engine.load(bad_checkpoint, version="s/2")
        assert caught.value.hint
        info = engine.info()
        assert (info.version, info.paused) == (None, True)
        for version in ("s/1", "s/2"):
            with pytest.raises(EngineError):
                engine.confirm(version)
        with pytest.raises(EngineError):
            engine.resume()
        assert engine.info().paused
        engine.load(checkpoints[0], version="s/1")
        engine.confirm("s/1")
        engine.resume()
        assert not engine.info().paused

    def test_another_version_is_not_confirmed(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """Neither before any load nor after one of another version, or of the same number in another stream."""
        self._only_if_it_checks()
        with pytest.raises(EngineError):
            engine.confirm("s/1")
        engine.pause()
        engine.load(checkpoints[0], version="s/1")
        for other in ("s/2", "t/1"):
            with pytest.raises(EngineError):
                engine.confirm(other)
        engine.confirm("s/1")
        engine.resume()

    def test_the_probe_is_finite_follows_the_weights_and_repeats_itself(
        self, engine: Engine, checkpoints: Sequence[Path]
    ) -> None:
        """It tells weights apart, and says the same of the same ones again."""
        self._only_if_it_probes(engine)
        first, other, again = (self._probed(engine, checkpoints[which], f"s/{which}") for which in (0, 1, 0))
        for probe in (first, other, again):
            assert probe.logprobs
            assert all(math.isfinite(logprob) and logprob <= 0 for logprob in probe.logprobs)
        assert first.logprobs != other.logprobs
        assert first == again

    def test_a_probe_while_paused_leaves_it_paused(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """Where it can be asked then at all."""
        self._only_if_it_probes(engine)
        if not engine.probes_paused:
            pytest.skip("this engine is probed after the resume")
        engine.pause()
        engine.load(checkpoints[0], version="s/1")
        probe = engine.probe()
        assert engine.info().paused
        engine.resume()
        assert probe == engine.probe()

    def test_waiting_lets_running_requests_end(
        self, engine: Engine, start_request: Callable[[], RunningRequest]
    ) -> None:
        """The pause returns once they have ended by themselves."""
        request = start_request()
        with ThreadPoolExecutor(1) as pool:
            pausing = pool.submit(engine.pause, "wait", timeout=_SECONDS)
            assert not wait([pausing], timeout=0.2).done
            request.finish()
            pausing.result(timeout=_SECONDS)
        assert engine.info().paused
        assert request.outcome() in ("length", "stop")
        engine.resume()

    def test_a_drain_that_takes_too_long_holds_nothing(
        self, engine: Engine, start_request: Callable[[], RunningRequest]
    ) -> None:
        """Generation goes on, until another pause says what else is to become of the requests."""
        request = start_request()
        with pytest.raises(DrainTimeout) as caught:
            engine.pause("wait", timeout=0.2)
        assert caught.value.hint
        assert not engine.info().paused
        assert request.reach(len(request.tokens) + 1)
        assert start_request().reach(1)
        engine.pause("abort")
        assert engine.info().paused
        assert request.outcome() == "abort"
        engine.resume()

    def test_aborting_ends_running_requests(self, engine: Engine, start_request: Callable[[], RunningRequest]) -> None:
        """Their clients are told."""
        request = start_request()
        engine.pause("abort")
        assert request.outcome() == "abort"
        engine.resume()

    def test_kept_requests_go_on_after_the_resume(
        self, engine: Engine, checkpoints: Sequence[Path], start_request: Callable[[], RunningRequest]
    ) -> None:
        """None of their tokens is made in between."""
        request = start_request()
        engine.pause("keep")
        engine.load(checkpoints[0], version="s/1")
        held = len(request.tokens)
        engine.load(checkpoints[1], version="s/2")
        assert len(request.tokens) == held
        engine.resume()
        assert request.reach(held + 1)
        request.finish()
        assert request.outcome() in ("length", "stop")

    def _probed(self, engine: Engine, checkpoint: Path, version: str) -> Probe:
        engine.pause("abort")
        engine.load(checkpoint, version=version)
        found = engine.probe() if engine.probes_paused else None
        engine.resume()
        if not engine.probes_paused:
            found = engine.probe()
        assert found is not None
        return found

    def _only_if_it_checks(self) -> None:
        if not self.checks:
            pytest.skip("there is no engine behind this adapter that could refuse")

    def _only_if_it_probes(self, engine: Engine) -> None:
        if not self.probes:
            assert engine.probe() is None
            pytest.skip("this engine has no probe")
