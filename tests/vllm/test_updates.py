"""The whole way with a real vLLM: a trainer publishes, a receiver patches and reloads, and clients stream meanwhile.

What is served must be what a server that is started on the version's checkpoint serves, token by token and in every
log-probability; eager execution on one machine repeats itself exactly. Requests that are to be running when the pause
comes last until the test tells them to end: how fast a machine makes tokens, and how long it lets a process wait for
a core, is not known.
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest
import tiny_llama
import training
from tiny_llama import END
from vllm_server import EXTENSION, Ending, LastingStream

from deltastore import Writer, open_store
from deltastore.storage.faults import FaultKind
from receiver.testing.streams import CompletionStream, complete
from tools.chaos.proxy import running_proxy
from tools.chaos.rules import Rule

if TYPE_CHECKING:
    from pathlib import Path

COMPARED = 200  # tokens of a kept request after the update: in longer ones rounding adds up until a tie falls otherwise
PROMPTS = ((5, 6, 7), (1000, 2000, 3000, 4000), tuple(range(100, 160)))
PRECISIONS = {"bf16": (), "fp8": ("--quantization", "fp8_per_channel")}
FLAVOURS = {"bf16": (), "bf16-extension": EXTENSION, "fp8-extension": EXTENSION}


def answers(url):
    return [complete(url, prompt, 40) for prompt in PROMPTS]


@pytest.fixture(scope="module", params=[*FLAVOURS])
def flavour(request):
    return request.param


@dataclass
class Fresh:
    """Servers that were started on versions 1 and 2, and what they answer."""

    urls: dict
    answers: dict


@pytest.fixture(scope="session")
def references(start_vllm, versions):
    """A function that returns the fresh servers of a precision; they take the place of another's."""
    made = {}

    def get(precision):
        if precision not in made:
            servers.close()
            made.clear()
            urls = {
                number: servers.enter_context(start_vllm(versions[number], *PRECISIONS[precision])).url
                for number in (1, 2)
            }
            made[precision] = Fresh(urls, {number: answers(url) for number, url in urls.items()})
            assert made[precision].answers[1] != made[precision].answers[2]
        return made[precision]

    with ExitStack() as servers:
        yield get


@pytest.fixture(scope="module")
def fresh(references, flavour):
    return references(flavour.partition("-")[0])


@pytest.fixture(scope="module")
def server(start_vllm, versions, flavour):
    with start_vllm(versions[0], *PRECISIONS[flavour.partition("-")[0]], *FLAVOURS[flavour]) as server:
        yield server


@dataclass
class Run:
    """A stream of versions, and receivers that follow it."""

    root: Path
    base: Path
    states: list
    commands: object
    engine_url: str
    extension: bool
    published: int = 0

    @property
    def store(self):
        return self.root / "store"

    def publish(self):
        self.published += 1
        with Writer(self.store, base=self.base if self.published == 1 else None) as writer:
            writer.publish(self.states[self.published]).result()

    def label(self, version):
        return f"{open_store(self.store).stream_id}/{version}"

    def follow(self, *options):
        words = ["receiver", "run", "--store", self.store, "--checkpoint", self.root / "live", "--base", self.base]
        words += ["--listen", "127.0.0.1:0", "--poll", "0.05", "--engine", "vllm", "--engine-url", self.engine_url]
        words += ["--engine-option", f"extension={'yes' if self.extension else 'no'}", *options]
        return Receiver(self.commands.start(*words))


class Receiver:
    def __init__(self, command):
        self.command = command
        training.until(lambda: "Listening on" in command.err or command.ends_within(0), what="a receiver")
        self._url = command.err.partition("Listening on ")[2].partition("\n")[0].rstrip(".")

    def status(self):
        return httpx.get(f"{self._url}/status", trust_env=False, timeout=30).json()

    def ready(self, version):
        def there():
            assert not self.command.ends_within(0), self.command.err
            record = self.status()
            return record["ready"] and record["serving"] == version

        training.until(there, seconds=120, what=f"version {version}")

    def end(self):
        self.command.send(signal.SIGTERM)
        assert self.command.end(60).code == 0


@pytest.fixture
def run(tmp_path, versions, states, commands, server, flavour):
    made = Run(tmp_path, versions[0], states, commands, server.url, flavour.endswith("extension"))
    made.publish()
    yield made
    commands.end_all()
    # What a failed test has left there must not trouble the next one.
    httpx.post(f"{server.url}/pause?mode=abort", trust_env=False, timeout=60)
    httpx.post(f"{server.url}/resume", trust_env=False, timeout=60)


class Traffic:
    """Clients that stream one completion after another, until told to stop."""

    def __init__(self, url, clients=3):
        self.streams = []
        self._url = url
        self._stopping = False
        self._threads = [threading.Thread(target=self._go_on, args=(PROMPTS[number],)) for number in range(clients)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stopping = True
        for thread in self._threads:
            thread.join()

    def _go_on(self, prompt):
        while not self._stopping:
            stream = CompletionStream(self._url, prompt, most_tokens=200)
            self.streams.append(stream)
            stream.outcome()

    @property
    def reasons(self):
        return [stream.finish_reason for stream in self.streams]


def generated(client):
    """How many tokens the server has made."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total"))


@pytest.mark.parametrize("in_flight", ["wait", "abort", "keep"])
def test_every_version_is_served_as_a_fresh_server_serves_it(run, server, fresh, tmp_path, in_flight):
    receiver = run.follow("--in-flight", in_flight, "--drain-deadline", "300")
    receiver.ready(1)
    assert answers(server.url) == fresh.answers[1]
    with Traffic(server.url) as traffic:
        lasting = LastingStream(server.url, PROMPTS[0], tmp_path)
        assert lasting.reach(1)
        training.until(lambda: any(stream.tokens for stream in traffic.streams), what="tokens")
        run.publish()
        if in_flight == "wait":
            # A server that waits for its requests calls itself paused.
            training.until(server.paused, what="a pause")
            assert lasting.finish_reason is None
            lasting.finish()
        receiver.ready(2)
        if in_flight == "keep":
            assert lasting.finish_reason is None
            lasting.finish()
        assert lasting.outcome() == ("abort" if in_flight == "abort" else "stop")
    assert set(traffic.reasons) <= ({"length", "abort"} if in_flight == "abort" else {"length"})
    assert answers(server.url) == fresh.answers[2]
    assert httpx.get(f"{server.url}/weight_info", trust_env=False).json() == {"weight_version": run.label(2)}
    record = receiver.status()["last_activation"]
    assert record["outcome"] == "activated"
    receiver.end()


def test_a_kept_request_goes_on_as_a_fresh_server_would_from_there(run, server, fresh, tmp_path):
    receiver = run.follow("--in-flight", "keep")
    receiver.ready(1)
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        others = generated(client)
        stream = LastingStream(server.url, PROMPTS[0], tmp_path)
        assert stream.reach(50)
        before = len(stream.tokens)
        run.publish()
        receiver.ready(2)
        by_then = int(generated(client) - others)  # more than have arrived here, perhaps
    assert stream.finish_reason is None
    assert stream.reach(by_then + COMPARED)
    stream.finish()
    assert stream.outcome() == "stop"
    assert stream.tokens[-1] == END
    made = list(zip(stream.tokens[:-1], stream.logprobs[:-1], strict=True))
    old = list(zip(*complete(fresh.urls[1], PROMPTS[0], len(made)), strict=True))
    assert made[:before] == old[:before]
    differing = next(number for number in range(len(made)) if made[number][0] != old[number][0])
    rest = made[differing:][:COMPARED]
    prompt = [*PROMPTS[0], *stream.tokens[:differing]]
    tokens, logprobs = complete(fresh.urls[2], prompt, len(rest))
    assert [token for token, _ in rest] == tokens
    assert [logprob for _, logprob in rest] == pytest.approx(logprobs, abs=0.05)
    receiver.end()


def test_spans_name_the_versions_that_a_kept_request_was_made_with(run, server, tmp_path):
    receiver = run.follow("--in-flight", "keep")
    receiver.ready(1)
    ending = Ending(tmp_path)
    sampling = {"max_tokens": 10_000, "temperature": 0, "ignore_eos": True}
    sampling |= {"stop_token_ids": [END], "extra_args": ending.arguments}
    body = {"token_ids": list(PROMPTS[0]), "sampling_params": sampling}
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, trust_env=False, timeout=120) as client:
        made = generated(client)
        asked = pool.submit(client.post, "/inference/v1/generate", json=body)
        training.until(lambda: generated(client) > made, what="a token")
        run.publish()
        receiver.ready(2)
        assert not asked.done()
        made = generated(client)
        training.until(lambda: generated(client) > made, what="a token after the update")
        ending.tell()
        choice = asked.result().raise_for_status().json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == [run.label(1), run.label(2)]
    assert (spans[0]["start"], spans[0]["end"]) == (0, spans[1]["start"])
    assert 0 < spans[1]["start"] < spans[1]["end"] == len(choice["token_ids"])
    receiver.end()


def test_a_receiver_killed_between_pause_and_resume_is_made_good_by_the_next_one(run, server, fresh, tmp_path):
    with running_proxy(server.url) as (proxy, run.engine_url):
        receiver = run.follow("--in-flight", "keep")
        receiver.ready(1)
        stream = LastingStream(server.url, PROMPTS[0], tmp_path)
        assert stream.reach(1)
        # The version is loaded, and the receiver does not hear that the caches were dropped.
        proxy.play([Rule(kind=FaultKind.STALL, path="/reset_prefix_cache", at=0)])
        run.publish()
        training.until(lambda: "stall" in proxy.traffic, what="a load")
        receiver.command.send(signal.SIGKILL)
        assert receiver.command.end().code == -signal.SIGKILL
        assert server.paused()
        assert stream.finish_reason is None
        proxy.play([])
        receiver = run.follow("--in-flight", "keep")
        receiver.ready(2)
        assert stream.reach(len(stream.tokens) + 1)
        stream.finish()
        assert stream.outcome() == "stop"
        assert answers(server.url) == fresh.answers[2]
        receiver.end()


@pytest.mark.parametrize("extension", [False, True], ids=["stock", "extension"])
def test_int8_weights_that_cannot_be_reloaded_are_caught_by_the_probe(
    start_vllm, states, tmp_path, commands, extension
):
    """The server reloads them with success; from then on every token is as likely as every other, or all is NaN."""
    made = [tiny_llama.int8_state(state) for state in states]
    base = tiny_llama.write_checkpoint(tmp_path / "base", made[0], tiny_llama.INT8_CONFIG)
    with start_vllm(base, *(EXTENSION if extension else ())) as server:
        good = complete(server.url, PROMPTS[0], 5)[1]
        assert None not in good
        run = Run(tmp_path, base, made, commands, server.url, extension)
        run.publish()
        receiver = run.follow()
        training.until(lambda: (receiver.status()["last_activation"] or {}).get("outcome") == "latched", seconds=120)
        record = receiver.status()
        assert not record["ready"]
        # Which of the two depends on what lies in memory.
        assert "not finite" in record["error"]["message"] or "the same log-prob" in record["error"]["message"]
        assert server.paused()
        commands.end_all()
