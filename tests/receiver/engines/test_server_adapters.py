"""The adapters of vLLM and SGLang against servers that fail: an error each, and never a version that is not there."""

from __future__ import annotations

import math
import threading

import httpx
import pytest

from deltastore.errors import DrainTimeout, EngineError
from receiver.engines import make_engine
from receiver.engines.http_client import TOKEN_NAME
from receiver.engines.vllm import VllmEngine
from receiver.testing.engine_faults import EngineFault, EngineFaultKind
from receiver.testing.engine_server import EngineServer
from receiver.testing.stand_in import expected_tokens
from receiver.testing.streams import CompletionStream, complete

PROMPT = (5, 6, 7)
SHORT = {f"{name}-timeout": "0.5" for name in ("request", "pause", "load", "probe")}
HANGS = {EngineFaultKind.HANG, EngineFaultKind.HANG_AFTER}

# The calls of an activation, in order, for each server; with how often each is made.
CALLS = {
    "vllm": ("/pause", "/is_paused", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache", "/resume"),
    "sglang": (
        "/get_model_info",
        "/pause_generation",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/flush_cache",
        "/continue_generation",
    ),
}
LOADS = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
FINE = {EngineFaultKind.CLOSE_IDLE, EngineFaultKind.PAUSE_HERE}
#: A connection of its own, so the loss of it is told; the answer's loss with the load done is told as well.
LOST = {EngineFaultKind.RESET, EngineFaultKind.LOSE_ANSWER, *HANGS}


@pytest.fixture
def checkpoints(tmp_path):
    made = []
    for number in (0, 1, 2):
        directory = tmp_path / f"v{number}"
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(bytes([number]) * 1000)
        made.append(directory)
    return made


@pytest.fixture(params=["vllm", "sglang"])
def kind(request):
    return request.param


@pytest.fixture
def server(checkpoints, kind):
    with EngineServer(checkpoints[0], kind=kind, seconds_per_token=0.0005) as server:
        yield server


@pytest.fixture
def engine(server, kind):
    engine = make_engine(kind, url=server.url)
    yield engine
    engine.close()


@pytest.fixture
def hasty(server, kind):
    engine = make_engine(kind, url=server.url, options=SHORT)
    yield engine
    engine.close()


def activate(engine, checkpoint, version, in_flight="keep"):
    engine.pause(in_flight)
    engine.load(checkpoint, version=version)
    engine.confirm(version)
    engine.resume()


@pytest.mark.parametrize("number", range(6))
def test_any_fault_in_any_call_is_an_error_or_harmless_and_the_next_try_ends_well(
    server, engine, hasty, kind, checkpoints, number
):
    """After whatever failed, one more activation is enough, unless the engine died."""
    path = CALLS[kind][number]
    wanted = [[token.token for token in expected_tokens(checkpoint, PROMPT, 4)] for checkpoint in checkpoints]
    for turn, fault in enumerate(one for one in EngineFaultKind if one is not EngineFaultKind.HALF_LOAD):
        version, checkpoint = f"s/{turn}", turn % 3
        server.add(EngineFault(path=path, kind=fault))
        trying = hasty if fault in HANGS else engine
        error = failure_of(activate, trying, checkpoints[checkpoint], version)
        while fault in HANGS and server.remaining:  # on a busy machine another call may take too long as well
            error = failure_of(activate, trying, checkpoints[checkpoint], version)
        assert server.remaining == 0, fault
        if error is not None:
            assert error.hint
            assert not isinstance(error, DrainTimeout)
            assert fault not in FINE
        if server.engine.dead:
            with pytest.raises(EngineError, match="nothing answers"):
                engine.info()
            server.restart()
            assert engine.info().version is None
        elif fault in LOST and path == LOADS[kind]:
            assert error is not None
            assert (engine.info().version, engine.info().paused) == (None, True)
        activate(engine, checkpoints[checkpoint], version)
        assert engine.info().version == version
        assert complete(server.url, PROMPT, 4)[0] == wanted[checkpoint]


def failure_of(call, *arguments):
    try:
        call(*arguments)
    except EngineError as error:
        return error
    return None


def test_a_load_that_stops_half_way_is_told_and_a_good_one_after_it_heals(server, engine, kind, checkpoints):
    activate(engine, checkpoints[1], "s/1")
    engine.pause("keep")
    server.add(EngineFault(path=LOADS[kind], kind=EngineFaultKind.HALF_LOAD))
    with pytest.raises(EngineError, match="another shape"):
        engine.load(checkpoints[2], version="s/2")
    assert (engine.info().version, engine.info().paused) == (None, True)
    with pytest.raises(EngineError, match="last load failed"):
        engine.resume()
    engine.load(checkpoints[1], version="s/1")
    engine.resume()
    assert complete(server.url, PROMPT, 4)[0] == [token.token for token in expected_tokens(checkpoints[1], PROMPT, 4)]


@pytest.mark.parametrize("path", ["/update_weight_version", "/reset_prefix_cache", "/update_weights_from_disk"])
def test_an_answer_of_200_without_success_is_a_failure(server, engine, kind, checkpoints, path):
    if path not in CALLS[kind]:
        pytest.skip("another server's call")
    activate(engine, checkpoints[1], "s/1")
    engine.pause("keep")
    tries = 5 if path == "/reset_prefix_cache" else 1
    server.add(*[EngineFault(path=path, kind=EngineFaultKind.NOT_SUCCESS)] * tries)
    with pytest.raises(EngineError, match=f"{path} says that it did not succeed: it could not"):
        engine.load(checkpoints[2], version="s/2")
    with pytest.raises(EngineError):
        engine.confirm("s/2")
    engine.load(checkpoints[2], version="s/2")
    engine.confirm("s/2")


def test_a_flush_that_does_not_succeed_at_once_is_tried_again(checkpoints):
    """Blocks may be on their way to another memory."""
    with EngineServer(checkpoints[0], kind="vllm") as server:
        engine = make_engine("vllm", url=server.url)
        server.add(EngineFault(path="/reset_prefix_cache", kind=EngineFaultKind.NOT_SUCCESS))
        activate(engine, checkpoints[1], "s/1")
        assert [call.path for call in server.calls].count("/reset_prefix_cache") == 2
        engine.close()


def test_a_load_is_never_sent_twice(server, engine, kind, checkpoints):
    engine.pause("keep")
    server.add(EngineFault(path=LOADS[kind], kind=EngineFaultKind.LOSE_ANSWER))
    with pytest.raises(EngineError):
        engine.load(checkpoints[1], version="s/1")
    assert [call.path for call in server.calls].count(LOADS[kind]) == 1


def test_connections_that_were_closed_while_idle_are_no_failure(server, engine, kind, checkpoints):
    """Several at once: each thread that asked left one behind."""
    asked = {"vllm": "/weight_info", "sglang": "/get_model_info"}[kind]
    meeting = threading.Barrier(3)
    server.add(*(EngineFault(path=asked, kind=EngineFaultKind.CLOSE_IDLE, hook=meeting.wait) for _ in range(3)))
    threads = [threading.Thread(target=engine.info) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.remaining == 0
    activate(engine, checkpoints[1], "s/1")
    assert engine.info().version == "s/1"


def test_a_connection_that_is_closed_just_when_it_is_used_again_is_no_failure_and_a_new_one_is(server, engine, kind):
    asked = {"vllm": "/weight_info", "sglang": "/get_model_info"}[kind]
    reset = EngineFault(path=asked, kind=EngineFaultKind.RESET)
    server.add(reset)
    with pytest.raises(EngineError, match=f"{asked} failed"):
        engine.info()
    before = engine.info()
    server.add(reset)
    assert engine.info() == before
    assert server.remaining == 0


def test_a_restart_is_another_incarnation_without_a_version(server, engine, checkpoints):
    activate(engine, checkpoints[1], "s/1")
    before = engine.info()
    server.die()
    with pytest.raises(EngineError, match="nothing answers") as caught:
        engine.info()
    assert "Start" in caught.value.hint
    server.restart()
    after = engine.info()
    assert (after.version, after.paused) == (None, False)
    assert after.incarnation != before.incarnation


def test_a_receiver_that_starts_anew_sees_what_the_one_before_left(server, engine, kind, checkpoints):
    """Paused, with the weights loaded or not known: it need only go on."""
    engine.pause("keep")
    engine.load(checkpoints[1], version="s/1")
    other = make_engine(kind, url=server.url)
    assert (other.info().version, other.info().paused) == ("s/1", True)
    server.add(EngineFault(path=LOADS[kind], kind=EngineFaultKind.INTERNAL_ERROR))
    with pytest.raises(EngineError):
        engine.load(checkpoints[2], version="s/2")
    assert (other.info().version, other.info().paused) == (None, True)
    with pytest.raises(EngineError):
        other.resume()
    other.load(checkpoints[2], version="s/2")
    other.resume()
    assert (engine.info().version, engine.info().paused) == ("s/2", False)
    other.close()


def test_a_load_into_an_engine_that_somebody_else_drains_freezes_it_first(server, engine, kind, checkpoints):
    stream = CompletionStream(server.url, PROMPT, most_tokens=2000)
    assert stream.reach(1)
    if kind == "vllm":
        draining = threading.Thread(
            target=lambda: httpx.post(f"{server.url}/pause?mode=wait", timeout=60, trust_env=False)
        )
        draining.start()
        while server.engine.running != "old":
            pass
    else:
        engine.pause("keep")
    other = make_engine(kind, url=server.url)
    other.load(checkpoints[1], version="s/1")
    held = len(server.engine._requests[0].tokens)
    other.resume()
    assert stream.outcome() == "length"
    if kind == "vllm":
        draining.join()
    before, after = stream.tokens[:held], stream.tokens[held:]
    assert 0 < len(before) < 2000
    assert before == [token.token for token in expected_tokens(checkpoints[0], PROMPT, held)]
    assert after == [token.token for token in expected_tokens(checkpoints[1], [*PROMPT, *before], len(after))]
    other.close()


def test_an_idle_engine_is_drained_in_no_time_at_all(engine):
    engine.pause("wait", timeout=0)
    assert engine.info().paused


@pytest.mark.parametrize("keep_kv", [False, True])
def test_prefixes_of_the_old_weights_are_dropped_unless_they_are_to_stay(server, engine, checkpoints, keep_kv):
    complete(server.url, PROMPT, 4)
    engine.pause("abort")
    engine.load(checkpoints[1], version="s/1", keep_kv=keep_kv)
    engine.resume()
    fresh = [token.token for token in expected_tokens(checkpoints[1], PROMPT, 4)]
    assert (complete(server.url, PROMPT, 4)[0] == fresh) != keep_kv


def test_tokens_of_kept_requests_are_of_one_version_each_over_many_updates(server, engine, checkpoints):
    stream = CompletionStream(server.url, PROMPT, most_tokens=4000)
    assert stream.reach(1)
    bounds = []
    for number in range(1, 9):
        engine.pause("keep")
        engine.load(checkpoints[number % 3], version=f"s/{number}")
        bounds.append((len(server.engine._requests[0].tokens), checkpoints[number % 3]))
        engine.resume()
        assert stream.reach(bounds[-1][0] + 20)
    engine.pause("abort")
    assert stream.outcome() == "abort"
    starts = [(0, checkpoints[0]), *bounds]
    for (start, checkpoint), end in zip(starts, [*(bound for bound, _ in bounds), len(stream.tokens)], strict=True):
        wanted = expected_tokens(checkpoint, [*PROMPT, *stream.tokens[:start]], end - start)
        assert stream.tokens[start:end] == [token.token for token in wanted]


@pytest.mark.parametrize("extension", [False, True])
def test_a_sick_reload_shows_in_the_probe(checkpoints, extension):
    with EngineServer(checkpoints[0], kind="vllm", sick_after_reload=True, extension=extension) as server:
        engine = make_engine("vllm", url=server.url, options={"extension": "yes" if extension else "no"})
        assert all(math.isfinite(value) for value in engine.probe().logprobs)
        activate(engine, checkpoints[1], "s/1")
        assert all(math.isnan(value) for value in engine.probe().logprobs)
        activate(engine, checkpoints[0], "s/0")
        assert all(math.isnan(value) for value in engine.probe().logprobs)
        engine.close()


def test_frozen_requests_do_not_run_on_weights_that_a_failed_load_left(server, engine, kind, checkpoints):
    """Also where the next pause is one that waits: they would run to their end."""
    stream = CompletionStream(server.url, PROMPT, most_tokens=100_000)
    assert stream.reach(1)
    engine.pause("keep")
    server.add(EngineFault(path=LOADS[kind], kind=EngineFaultKind.HALF_LOAD))
    with pytest.raises(EngineError):
        engine.load(checkpoints[1], version="s/1")
    engine.pause("wait", timeout=30)
    assert not server.engine.dead
    engine.load(checkpoints[1], version="s/1")
    engine.resume()
    assert stream.reach(len(stream.tokens) + 5)


def test_one_worker_that_holds_another_label_is_not_confirmed(checkpoints):
    with EngineServer(checkpoints[0], kind="vllm", extension=True) as server:
        engine = make_engine("vllm", url=server.url, options={"extension": "yes"})
        activate(engine, checkpoints[1], "s/1")
        server._routes._label = "s/0"
        with pytest.raises(EngineError, match="s/0 and s/1"):
            engine.confirm("s/1")
        engine.close()


def test_an_extension_that_is_not_there_is_told(checkpoints):
    with EngineServer(checkpoints[0], kind="vllm") as server:
        engine = make_engine("vllm", url=server.url, options={"extension": "yes"})
        engine.pause("keep")
        with pytest.raises(EngineError, match="no attribute 'deltastore_load'"):
            engine.load(checkpoints[1], version="s/1")
        engine.close()


def answering(**answers):
    def answer(request):
        return answers.get(request.url.path.strip("/").replace("/", "_"), httpx.Response(404, json={}))

    return VllmEngine("http://127.0.0.1:1/", transport=httpx.MockTransport(answer))


ODD = {
    "no version": (
        {"weight_info": httpx.Response(200, json={})},
        lambda engine: engine.info(),
        "without weight_version",
    ),
    "a list": ({"weight_info": httpx.Response(200, json=[1])}, lambda engine: engine.info(), "without weight_version"),
    "no endpoint": ({}, lambda engine: engine.info(), "has no /weight_info"),
    "no pause": (
        {"is_paused": httpx.Response(200, json={})},
        lambda engine: engine.load(None, version="s/1"),
        "is_paused",
    ),
    "no status": ({"pause": httpx.Response(200, json={})}, lambda engine: engine.pause("keep"), "it is paused"),
    "no model": (
        {"v1_models": httpx.Response(200, json={"data": []})},
        lambda engine: engine.probe(),
        "names no model",
    ),
    "no choices": (
        {
            "v1_models": httpx.Response(200, json={"data": [{"id": "m"}]}),
            "v1_completions": httpx.Response(200, json={"choices": []}),
        },
        lambda engine: engine.probe(),
        "without log-probabilities",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_any_odd_answer_is_an_engine_error_with_a_hint(case):
    answers, call, message = ODD[case]
    with pytest.raises(EngineError, match=message) as caught:
        call(answering(**answers))
    assert caught.value.hint


def test_without_metrics_the_version_string_tells_incarnations_apart():
    version = httpx.Response(200, json={"weight_version": "default"})
    engine = answering(weight_info=version, is_paused=httpx.Response(200, json={"is_paused": False}))
    assert engine.info().incarnation == engine.info().incarnation


def test_a_token_of_the_environment_is_sent(monkeypatch):
    monkeypatch.setenv(TOKEN_NAME, "secret")
    seen = []

    def answer(request):
        seen.append(request.headers.get("Authorization"))
        return httpx.Response(200, json={"status": "resumed", "weight_version": "s/1"})

    VllmEngine("http://127.0.0.1:1", transport=httpx.MockTransport(answer)).resume()
    assert set(seen) == {"Bearer secret"}
