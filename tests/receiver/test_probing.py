"""What is made of a probe: finite, changed with the weights, as expected."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import EngineError, UsageError
from receiver.activation import Weights
from receiver.engines.base import Probe
from receiver.probing import LEAST_CHANGE, Expected, agree, judge, read_expected

WEIGHTS = Weights("s/7", 7, "c", Path("slot"))
GOOD = Probe((-0.5, -1.25, -3.0), (4, 9, 2))
OTHER = Probe((-0.5, -1.25, -2.5), (4, 9, 2))


def judged(probe, *, before=None, changed=None, expected=None):
    return judge(probe, WEIGHTS, before=before, changed=changed, expected=expected or {})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_probe_that_is_not_finite_is_never_right(value):
    with pytest.raises(EngineError, match="1 of 3 log-probabilities that are not finite at s/7") as caught:
        judged(Probe((-0.5, value, -3.0)))
    assert caught.value.hint
    with pytest.raises(EngineError, match="none"):
        judged(Probe(()))


def test_a_probe_that_is_the_same_everywhere_is_of_weights_that_say_nothing():
    uniform = -math.log(4096)
    with pytest.raises(EngineError, match=r"same log-probability -8\.3178 at each of its positions at s/7"):
        judged(Probe((uniform,) * 8))
    assert judged(Probe((0.0,) * 8)) is None
    assert judged(Probe((uniform,) * 3)) is None
    assert judged(Probe((uniform,) * 7 + (-8.0,))) is None
    assert judged(Probe((uniform,) * 8), expected={"7": Expected((uniform,) * 8)}) is None


def test_a_probe_has_to_change_if_enough_of_the_weights_did():
    assert judged(GOOD, before=OTHER, changed=1.0) is None
    with pytest.raises(EngineError, match=r"exactly what it was before, though 1\.000% of the elements changed"):
        judged(GOOD, before=GOOD, changed=0.01)
    with pytest.raises(EngineError):
        judged(GOOD, before=GOOD, changed=LEAST_CHANGE)
    assert "hardly anything changed" in judged(GOOD, before=GOOD, changed=LEAST_CHANGE / 2)
    assert "not known" in judged(GOOD, before=GOOD, changed=None)
    assert judged(GOOD, before=Probe(GOOD.logprobs, (4, 9, 3)), changed=1.0) is None


@pytest.mark.parametrize("name", ["7", "s/7"])
def test_a_probe_has_to_be_as_expected_where_that_is_known(name):
    assert judged(GOOD, expected={name: Expected((-0.52, -1.25), tolerance=0.03)}) is None
    for wrong in (Expected((-0.6, -1.25), tolerance=0.03), Expected((-0.5, -1.25, -3.0, -1.0))):
        with pytest.raises(EngineError, match="not as expected"):
            judged(GOOD, expected={name: wrong})
    assert judged(GOOD, expected={"8": Expected((0.0,))}) is None


def test_probes_of_the_same_weights_agree_though_kernels_differ():
    assert agree(GOOD, Probe((-0.53, -1.2, -3.05), (4, 9, 2)))
    assert not agree(GOOD, OTHER)
    assert not agree(GOOD, Probe((math.nan,) * 3, (4, 9, 2)))
    assert not agree(GOOD, Probe((-0.5,)))
    # Two tokens of nearly the same probability: whatever follows another one tells nothing.
    assert agree(GOOD, Probe((-0.5, -1.26, -9.0), (4, 8, 1)))
    assert not agree(GOOD, Probe((-0.5, -2.0, -9.0), (4, 8, 1)))


@given(st.lists(st.floats(-50, 0), min_size=1, max_size=8).map(tuple))
def test_every_probe_agrees_with_itself_and_is_expected_by_itself(logprobs):
    probe = Probe(logprobs)
    assert agree(probe, probe)
    assert judged(probe, expected={"7": Expected(logprobs, tolerance=0.0)}) is None


def test_expected_probes_are_read_from_a_file(tmp_path):
    path = tmp_path / "probes.json"
    path.write_text(json.dumps({"7": {"logprobs": [-0.5], "tolerance": 0.1}, "s/8": {"logprobs": [-1]}}))
    read = read_expected(path)
    assert read == {"7": Expected((-0.5,), 0.1), "s/8": Expected((-1.0,), 0.05)}


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"7": [1]}', '{"7": {"logprobs": []}}', '{"7": {"logprobs": [1], "tolerance": -1}}', "\xff", None],
)
def test_a_file_that_says_nothing_usable_is_refused(tmp_path, text):
    path = tmp_path / "probes.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"probes\.json") as caught:
        read_expected(path)
    assert caught.value.hint
