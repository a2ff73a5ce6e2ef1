"""What is added to an answer, and that nothing else changes, in whatever pieces it comes."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from receiver.gateway.rewrite import EventStream, JsonObject, Lines, LineStream, PassedOn, writer_for

A, B = "s/1", "s/2"


def chunk(text, finish=None, index=0, **more):
    return {"choices": [{"index": index, "text": text, "finish_reason": finish}], **more}


def sse(*chunks, done=True):
    events = [f"data: {json.dumps(one)}\n\n".encode() for one in chunks]
    return b"".join(events) + (b"data: [DONE]\n\n" if done else b"")


def cut(data, places):
    places = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


def whole(writer, data, places=(), label=A):
    return b"".join(writer.feed(piece, label) for piece in cut(data, places)) + writer.end()


def events(data):
    return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]


places = st.lists(st.integers(0, 4000), max_size=30)
lines = st.lists(
    st.sampled_from(
        [
            b"data: " + json.dumps(chunk("a")).encode(),
            b"data:" + json.dumps(chunk("}")).encode(),
            b"data: [DONE",
            b"data: {broken",
            b": ping",
            b"event: x",
            b"id: 7",
            b"data",
            b"",
            "data: é\u2028".encode(),
        ]
    ),
    max_size=12,
)
ends = st.lists(st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n"]), min_size=12, max_size=12)


@given(st.binary(max_size=300) | st.text("ab\r\n", max_size=60).map(str.encode), places)
def test_lines_hold_every_byte_and_are_the_same_in_any_pieces(data, at):
    def split(pieces):
        made = Lines()
        found = [line for piece in pieces for line, _, _ in made.feed(piece, A)]
        return found, made.rest()

    found, rest = split(cut(data, at))
    assert b"".join(found) + rest == data
    assert (found, rest) == split([data])
    assert all(line[-1:] in (b"\n", b"\r") for line in found)


@given(lines, ends, places)
def test_a_stream_that_ends_no_choice_is_as_it_was_and_gets_one_event_at_its_end(parts, at_ends, at):
    data = b"".join(line + end for line, end in zip(parts, at_ends, strict=False))
    out = whole(EventStream(A), data, at)
    assert out.startswith(data)
    added = out[len(data) :]
    if data and not data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").endswith(b"\n\n") and data.strip(b"\r\n"):
        # It ends within an event.
        assert added == b""
    else:
        assert added.startswith(b'data: {"object":"weight_version","choices":[],"weight_version_start":"s/1",')
        assert added.endswith(b"}\n\n")
        assert added.count(b"\n") == 2
    assert out == whole(EventStream(A), data)


@pytest.mark.parametrize(
    "rest", [b"data: ", b'data: {"choices": [{"ind', b'data: {"a": {}', b": pi", b"data: x\n", b"data: x\r"]
)
def test_half_an_event_stays_one(rest):
    data = sse(chunk("a"), done=False) + rest
    assert whole(EventStream(A), data) == data


def test_the_last_event_may_want_its_end():
    for last in (sse(chunk("", "stop"), done=False), sse(done=True)):
        out = whole(EventStream(A), sse(chunk("a"), done=False) + last.strip())
        assert out.count(b'"weight_version_spans":[{"version":"s/1","start":0,"end":1}]') == 1
        assert out.endswith(last.strip()[-1:])


# Any stream that a server may make

texts = st.text(st.sampled_from('aé\u2028😀"}{\\\x85 '), max_size=4)
spaces = st.sampled_from([{}, {"separators": (",", ":")}, {"ensure_ascii": False}])


@st.composite
def chunks(draw):
    """Draw the chunks of one answer: several choices that advance in any order; some have a reason at their end."""
    choices = draw(st.integers(1, 3))
    chat, usage = draw(st.booleans()), draw(st.booleans())
    made = []
    for index in draw(st.lists(st.integers(0, choices - 1), max_size=8)):
        text = draw(texts)
        said = {"delta": {"content": text}} if chat else {"text": text}
        made.append({"id": "x", "choices": [{"index": index, **said, "finish_reason": None}]})
    for index in draw(st.permutations(range(choices)))[: draw(st.integers(0, choices))]:
        said = {"delta": {}} if chat else {"text": ""}
        made.append({"id": "x", "choices": [{"index": index, **said, "finish_reason": "stop"}]})
    if usage:
        made.append({"id": "x", "choices": [], "usage": {"completion_tokens": draw(st.integers(0, 20))}})
    return made


@st.composite
def streams(draw):
    """Draw a whole stream's bytes, in any of the ways that server-sent events may be written in, and its chunks."""
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    told = draw(chunks())
    out = "".join(draw(st.sampled_from(["", f": hello{end}{end}", f"retry: 5{end}{end}"])))
    for one in told:
        before = draw(st.sampled_from(["", "", f": keep-alive{end}{end}", f"id: 7{end}", f"event: message{end}"]))
        colon = draw(st.sampled_from(["data: ", "data:", "data:  "]))
        out += f"{before}{colon}{json.dumps(one, **draw(spaces))}{end}{end}"
    if draw(st.booleans()):
        out += f"data: [DONE]{end}{end}"
    return out.encode(), told


FIELDS = re.compile(rb',"weight_version_start":"s/1","weight_version_end":"s/1","weight_version_spans":\[[^]]*\]')
OWN = re.compile(rb'data: \{"object":"weight_version","choices":\[\]' + FIELDS.pattern + rb"\}\n\n")


@given(streams(), places)
def test_any_stream_in_any_pieces_gets_the_same_fields_and_is_as_it_was_without_them(made, at):
    data, told = made
    out = whole(EventStream(A), data, at)
    assert out == whole(EventStream(A), data)
    assert FIELDS.sub(b"", OWN.sub(b"", out)) == data
    ends = [one for one in told if not one["choices"] or one["choices"][0]["finish_reason"]]
    assert len(OWN.findall(out)) == (not ends)
    assert len(FIELDS.findall(out)) == max(1, len(ends))


@given(places, st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_the_chunk_that_ends_a_choice_gets_the_fields_and_nothing_else_changes(at, end):
    plain = sse(chunk("a"), chunk("b"), chunk("", "stop")).replace(b"\n", end)
    out = whole(EventStream(A), plain, at)
    fields = b',"weight_version_start":"s/1","weight_version_end":"s/1",'
    fields += b'"weight_version_spans":[{"version":"s/1","start":0,"end":2}]'
    assert out.count(fields) == 1
    assert out.replace(fields, b"") == plain
    assert b'"finish_reason": "stop"}]' + fields in out


def test_the_usage_after_the_last_chunk_gets_them_too():
    usage = {"choices": [], "usage": {"completion_tokens": 5}}
    last, after = events(whole(EventStream(A), sse(chunk("ab"), chunk("c", "length"), usage)))[-2:]
    assert last["weight_version_spans"] == [{"version": A, "start": 0, "end": 2}]
    # The engine's own count is the better one.
    assert after["weight_version_spans"] == [{"version": A, "start": 0, "end": 5}]


def test_a_stream_over_an_update_has_a_span_of_each_version():
    writer = EventStream(A)
    out = writer.feed(sse(chunk("a"), chunk("b"), done=False), A)
    # An event that comes in two pieces was made before the first.
    event = sse(chunk("c"), done=False)
    out += writer.feed(event[:9], A) + writer.feed(event[9:], B)
    out += writer.feed(sse(chunk("d"), chunk("e", "stop")), B) + writer.end()
    last = events(out)[-1]
    assert (last["weight_version_start"], last["weight_version_end"]) == (A, B)
    spans = [{"version": A, "start": 0, "end": 3}, {"version": B, "start": 3, "end": 5}]
    assert last["weight_version_spans"] == spans
    assert out.endswith(b"data: [DONE]\n\n")


def test_each_choice_has_its_spans():
    writer = EventStream(A)
    writer.feed(sse(chunk("a"), chunk("b", index=1), done=False), A)
    out = writer.feed(sse(chunk("c", "stop", index=1), chunk("d", "stop")), B)
    assert events(out)[-1]["weight_version_spans"] == [
        {"version": A, "start": 0, "end": 1, "choice": 0},
        {"version": B, "start": 1, "end": 2, "choice": 0},
        {"version": A, "start": 0, "end": 1, "choice": 1},
        {"version": B, "start": 1, "end": 2, "choice": 1},
    ]


CHUNKS = {
    "token ids": ({"choices": [{"index": 0, "text": "abc", "token_ids": [1, 2, 3]}]}, 3),
    "log-probabilities of completions": ({"choices": [{"text": "a", "logprobs": {"tokens": ["a", "b"]}}]}, 2),
    "log-probabilities of chats": ({"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{}, {}]}}]}, 2),
    "a role": ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0),
    "a thought": ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, 1),
    "a total": (chunk("ab", usage={"completion_tokens": 4}), 4),
    "of SGLang": ({"text": "abcd", "meta_info": {"completion_tokens": 7, "finish_reason": None}}, 7),
    "a total of another choice": ({"choices": [{"index": 1, "text": ""}], "usage": {"completion_tokens": 4}}, 4),
    "odd": ({"choices": ["x", {"index": "y", "text": "a"}], "usage": 3}, 1),
    "no choices": ({"choices": 7}, 0),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_counts_for_the_tokens_that_it_tells(name):
    told, count = CHUNKS[name]
    writer = EventStream(A)
    writer.feed(sse(told, done=False), A)
    (last,) = events(writer.feed(sse(chunk("", "stop"), done=False), A))
    assert sum(span["end"] for span in last["weight_version_spans"]) == count


def test_json_lines_get_a_line_of_their_own():
    tokens = b"".join(json.dumps({"index": n, "token": n}).encode() + b"\n" for n in range(3))
    writer = LineStream(A)
    out = writer.feed(tokens, A) + writer.feed(tokens + b'{"done":true}', B) + writer.end()
    assert out.startswith(tokens + tokens + b'{"done":true}\n')
    assert json.loads(out.splitlines()[-1]) == {
        "weight_version_start": A,
        "weight_version_end": B,
        "weight_version_spans": [{"version": A, "start": 0, "end": 3}, {"version": B, "start": 3, "end": 6}],
    }


@given(st.binary(max_size=200), places)
def test_json_lines_hold_every_byte(data, at):
    out = whole(LineStream(A), data, at)
    assert out.startswith(data)
    assert out == whole(LineStream(A), data)


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.text(max_size=4), json_values, max_size=4), st.sampled_from(["", " ", "\n", "\r\n  "]), places
)
def test_a_json_object_gets_the_fields_before_its_end(value, space, at):
    data = (space + json.dumps(value) + space).encode()
    out = whole(JsonObject(A), data, at)
    assert json.loads(out) == {**value, "weight_version_start": A, "weight_version_end": A}
    for fields in (
        b',"weight_version_start":"s/1","weight_version_end":"s/1"',
        b'"weight_version_start":"s/1","weight_version_end":"s/1"',
    ):
        out = out.replace(fields, b"")
    assert out == data


@given(
    st.sampled_from([b"[{}]", b"7", b'"}"', b"", b"x{}", b"{", b"}", b" ", b'{"a": 1', b"{} {}", b'{"a": NaN}'])
    | st.binary(max_size=30).filter(lambda data: data.strip()[:1] != b"{"),
    places,
)
def test_what_is_no_json_object_is_as_it_was(data, at):
    assert whole(JsonObject(A), data, at) == data


@given(st.dictionaries(st.text(max_size=4), json_values, min_size=1, max_size=4), st.data(), places)
def test_a_broken_object_is_as_it_was_although_it_begins_and_ends_as_one(value, draw, at):
    text = json.dumps(value, ensure_ascii=False).encode()
    start = draw.draw(st.integers(1, len(text) - 1))
    data = text[:start] + text[draw.draw(st.integers(start, len(text) - 1)) :]
    try:
        json.loads(data)
    except ValueError:
        assert whole(JsonObject(A), data, at) == data
    else:
        assert json.loads(whole(JsonObject(A), data, at))["weight_version_start"] == A


def test_an_object_too_long_to_be_held_is_passed_on(monkeypatch):
    monkeypatch.setattr("receiver.gateway.rewrite._MOST_OBJECT", 100)
    data = json.dumps({"a": "x" * 300}).encode()
    writer = JsonObject(A)
    assert writer.feed(data[:50], A) == b""
    assert writer.feed(data[50:200], A) == data[:200]
    assert writer.feed(data[200:], A) + writer.end() == data[200:]


def test_an_object_made_over_an_update_says_both_versions():
    writer = JsonObject(A)
    out = writer.feed(b'{"a": 1', B) + writer.feed(b"}", B) + writer.end()
    assert json.loads(out)["weight_version_end"] == B


def test_a_line_too_long_to_be_read_is_passed_on(monkeypatch):
    monkeypatch.setattr("receiver.gateway.rewrite._MOST_LINE", 100)
    long = sse(chunk("x" * 300, "stop"), done=False)
    writer = EventStream(A)
    # What is sent of it does not wait for its end.
    assert writer.feed(long[:200], A) == long[:200]
    out = writer.feed(long[200:], A) + writer.feed(sse(chunk("a")), A) + writer.end()
    assert out.startswith(long[200:] + sse(chunk("a"), done=False))
    assert events(out)[-1]["weight_version_spans"] == [{"version": A, "start": 0, "end": 1}]


@pytest.mark.parametrize("sent", [b"", b"data: x\n\n", b"data: half", b"data: x\n", b"data: x\r\n", b"data: x\r\n\r\n"])
def test_a_stream_that_broke_off_ends_with_an_error_event_of_its_own(sent):
    writer = EventStream(A)
    out = writer.feed(sent, A) + writer.broken(b'{"error":{"code":"c"}}')
    error = out.replace(b"\r\n", b"\n").split(b"\n\n")[-2].lstrip()
    assert error.startswith(b"data: ")
    told = json.loads(error[6:])
    assert (told["error"], told["weight_version_start"]) == ({"code": "c"}, A)


def test_lines_that_broke_off_end_with_an_error_and_half_an_object_cannot():
    writer = LineStream(A)
    out = writer.feed(b'{"token": 1}\n{"tok', A) + writer.broken(b'{"error":{}}')
    assert [set(json.loads(line)) for line in out.splitlines()][1] == {
        "error",
        "weight_version_start",
        "weight_version_end",
        "weight_version_spans",
    }
    assert JsonObject(A).broken(b"{}") is None
    assert PassedOn().broken(b"{}") is None


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        ("text/event-stream; charset=utf-8", EventStream),
        ("application/x-ndjson", LineStream),
        ("Application/JSON", JsonObject),
        ("audio/wav", PassedOn),
        ("", PassedOn),
    ],
)
def test_the_kind_of_an_answer_is_told_by_its_type(content_type, kind):
    assert type(writer_for(content_type, A)) is kind
