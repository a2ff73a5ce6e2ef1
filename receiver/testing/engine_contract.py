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

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import EngineError
from receiver.engines.base import EngineInfo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from receiver.engines.base import Engine

__all__ = ["EngineContract"]


class EngineContract:
    """Subclass it, name the subclass ``Test…`` and give it the two fixtures.

    An adapter that has no engine behind it, and so nothing that could refuse, sets ``checks`` to ``False``.
    """

    checks = True
    """Whether the engine notices what is wrong: a load without a pause, a bad checkpoint, another version."""

    @pytest.fixture
    def engine(self) -> Engine:
        """Give a fresh engine that generates, and that nothing was loaded into yet."""
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

    def test_a_fresh_engine_has_an_incarnation_no_version_and_is_not_paused(self, engine: Engine) -> None:
        """What the receiver sees of an engine that has just started."""
        info = engine.info()
        assert isinstance(info, EngineInfo)
        assert info.incarnation
        assert (info.version, info.paused) == (None, False)

    def test_an_activation_ends_at_the_version(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """Pause, load, confirm, resume, twice; the incarnation stays."""
        before = engine.info().incarnation
        for version, checkpoint in zip(("7", "8"), checkpoints, strict=True):
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
        for version, checkpoint in (("1", checkpoints[0]), ("2", checkpoints[1]), ("1", checkpoints[0])):
            engine.load(checkpoint, version=version)
        engine.confirm("1")
        engine.resume()
        assert engine.info().version == "1"

    def test_pause_and_resume_may_be_repeated(self, engine: Engine) -> None:
        """A receiver that does not know how far the last one came starts over."""
        engine.resume()
        engine.pause()
        engine.pause()
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
        engine.pause()
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(engine.info) for _ in range(20)]
            engine.load(checkpoints[0], version="3")
            assert {future.result().version for future in asked} <= {None, "3"}
        engine.resume()

    def test_loading_without_a_pause_is_refused(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """Forward passes would see mixed weights."""
        self._only_if_it_checks()
        with pytest.raises(EngineError):
            engine.load(checkpoints[0], version="1")
        assert engine.info().version is None

    def test_a_failed_load_leaves_it_paused_without_a_version(
        self, engine: Engine, checkpoints: Sequence[Path], bad_checkpoint: Path
    ) -> None:
        """Nothing is known of the weights then: nothing is confirmed or resumed until a load succeeds."""
        self._only_if_it_checks()
        engine.pause()
        engine.load(checkpoints[0], version="1")
        with pytest.raises(EngineError) as caught:
            engine.load(bad_checkpoint, version="2")
        assert caught.value.hint
        info = engine.info()
        assert (info.version, info.paused) == (None, True)
        for version in ("1", "2"):
            with pytest.raises(EngineError):
                engine.confirm(version)
        with pytest.raises(EngineError):
            engine.resume()
        assert engine.info().paused
        engine.load(checkpoints[0], version="1")
        engine.confirm("1")
        engine.resume()
        assert not engine.info().paused

    def test_another_version_is_not_confirmed(self, engine: Engine, checkpoints: Sequence[Path]) -> None:
        """Neither before any load nor after one of another version."""
        self._only_if_it_checks()
        with pytest.raises(EngineError):
            engine.confirm("1")
        engine.pause()
        engine.load(checkpoints[0], version="1")
        with pytest.raises(EngineError):
            engine.confirm("2")
        engine.confirm("1")
        engine.resume()

    def _only_if_it_checks(self) -> None:
        if not self.checks:
            pytest.skip("there is no engine behind this adapter that could refuse")
