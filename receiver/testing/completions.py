"""OpenAI's completions and chats over a stand-in, as vLLM and SGLang answer them."""

from __future__ import annotations

import math
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from receiver.testing.engine_calls import Answer, Call, wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from receiver.testing.stand_in import StandIn, Token

__all__ = ["Completions", "chat_prompt", "number"]

#: What vLLM takes as a salt of its prefix cache.
_MOST_SALT: Final = 128
_NOT_IN_SALT: Final = frozenset("@/\\\0")


class _Wrong(Exception):
    """A request that makes no sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A request, read."""

    id: str
    chat: bool
    prompt: tuple[int, ...]
    most_tokens: int
    choices: int
    logprobs: bool
    token_ids: bool
    usage: bool
    usage_of_each: bool
    salt: str | None
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class _Choice:
    """What was made of one of a request's choices."""

    made: list[Token] = field(default_factory=list)
    reason: str = "length"


class Completions:
    """Both endpoints. ``version`` tells what SGLang says of its weights."""

    def __init__(self, engine: StandIn, kind: Literal["vllm", "sglang"], version: Callable[[], str]) -> None:
        self._engine = engine
        self._kind = kind
        self._version = version

    def complete(self, call: Call) -> Answer:
        """Answer ``/v1/completions``. Raises ``Died``."""
        return self._answer(call, chat=False)

    def chat(self, call: Call) -> Answer:
        """Answer ``/v1/chat/completions``. Raises ``Died``."""
        return self._answer(call, chat=True)

    def _answer(self, call: Call, *, chat: bool) -> Answer:
        try:
            asked = _read(call.body, chat=chat)
        except _Wrong as error:
            return wrong(str(error))
        if call.body.get("stream"):
            return Answer(events=self._events(asked))
        choices = [_Choice() for _ in range(asked.choices)]
        for index, token, reason in self._generate(asked):
            if call.left():
                return Answer({"error": {"message": "Client disconnected"}}, status=400)
            choices[index].made += [] if token is None else [token]
            choices[index].reason = reason or "length"
        if not all(math.isfinite(token.logprob) for choice in choices for token in choice.made):
            return wrong("Out of range float values are not JSON compliant")
        told = [self._choice(asked, index, choice.made, choice.reason) for index, choice in enumerate(choices)]
        made = sum(len(choice.made) for choice in choices)
        answer = _head(asked, stream=False) | {"choices": told, "usage": _usage(asked, made)}
        if self._kind == "sglang":
            answer["metadata"] = {"weight_version": self._version()}
        return Answer(answer)

    def _events(self, asked: _Asked) -> Generator[object, None, None]:
        made = [0] * asked.choices

        def chunk(index: int, choice: dict[str, Any]) -> dict[str, Any]:
            usage = {"usage": _usage(asked, made[index])} if asked.usage_of_each else {}
            return head | {"choices": [choice]} | usage

        head = _head(asked, stream=True)
        if asked.chat:
            for index in range(asked.choices):
                delta = {"role": "assistant", "content": ""}
                yield chunk(index, {"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        # SGLang ends a chat's choice by a chunk of its own.
        apart = asked.chat and self._kind == "sglang"
        for index, token, reason in self._generate(asked):
            made[index] += token is not None
            if token is None or not apart:
                yield chunk(index, self._choice(asked, index, [] if token is None else [token], reason, stream=True))
            else:
                yield chunk(index, self._choice(asked, index, [token], None, stream=True))
                if reason is not None:
                    yield chunk(index, self._choice(asked, index, [], reason, stream=True))
        if asked.usage:
            yield head | {"choices": [], "usage": _usage(asked, sum(made))}
        yield "[DONE]"

    def _generate(self, asked: _Asked) -> Iterator[tuple[int, Token | None, str | None]]:
        """Generate all choices, a token of each in turn; each choice's last comes with its reason."""
        with ExitStack() as stack:
            requests = [
                self._engine.admit(asked.prompt, asked.most_tokens, salt=asked.salt) for _ in range(asked.choices)
            ]
            for request in requests:
                stack.callback(self._engine.leave, request)
            running = {index: self._engine.generate(request) for index, request in enumerate(requests)}
            while running:
                for index, tokens in tuple(running.items()):
                    token = next(tokens, None)
                    aborted = token is None and requests[index].aborted
                    at_end = len(requests[index].tokens) == requests[index].most_tokens
                    if token is not None or aborted:
                        yield index, token, "abort" if aborted else "length" if at_end else None
                    if token is None:
                        del running[index]

    def _choice(
        self, asked: _Asked, index: int, made: Sequence[Token], reason: str | None, *, stream: bool = False
    ) -> dict[str, Any]:
        text = "".join(_text_of(token) for token in made)
        if not asked.chat:
            said: dict[str, Any] = {"text": text}
        elif stream:
            said = {"delta": {"content": text} if made else {}}
        else:
            said = {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}}
        return {
            "index": index,
            **said,
            "logprobs": _logprobs(asked, made) if asked.logprobs else None,
            "finish_reason": reason,
            "stop_reason" if self._kind == "vllm" else "matched_stop": None,
            "token_ids": [token.token for token in made] if asked.token_ids else None,
        }


def chat_prompt(messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Return the tokens that a chat's messages are put to the model as."""
    return tuple("".join(f"<{message['role']}>{message['content']}" for message in messages).encode())


def number(value: float) -> float | None:
    """Give a number as these servers write it: what JSON has no word for is null."""
    return value if math.isfinite(value) else None


def _read(body: dict[str, object], *, chat: bool) -> _Asked:
    """Read a request. Raises ``_Wrong``."""
    options = body.get("stream_options") or {}
    if options and not body.get("stream"):
        raise _Wrong("Stream options can only be defined when `stream=True`.")
    if not isinstance(options, dict):
        raise _Wrong("stream_options are no object")
    most, choices = body.get("max_completion_tokens") or body.get("max_tokens") or 16, body.get("n") or 1
    if not isinstance(most, int) or not isinstance(choices, int) or min(most, choices) < 1:
        raise _Wrong("n and max_tokens are of another type")
    logprobs = body.get("logprobs")
    return _Asked(
        id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        chat=chat,
        prompt=_messages(body) if chat else _prompt(body),
        most_tokens=most,
        choices=choices,
        logprobs=bool(logprobs) if chat else logprobs is not None,
        token_ids=bool(body.get("return_token_ids")),
        usage=bool(options.get("include_usage")),
        usage_of_each=bool(options.get("include_usage")) and bool(options.get("continuous_usage_stats")),
        salt=_salt(body),
    )


def _prompt(body: dict[str, object]) -> tuple[int, ...]:
    prompt = body.get("prompt")
    if not isinstance(prompt, (list, str)):
        raise _Wrong("prompt is of another type")
    return tuple(prompt.encode() if isinstance(prompt, str) else prompt)


def _messages(body: dict[str, object]) -> tuple[int, ...]:
    messages: Any = body.get("messages")
    try:
        return chat_prompt(messages)
    except (TypeError, KeyError):
        raise _Wrong("messages are of another type") from None


def _salt(body: dict[str, object]) -> str | None:
    salt = body.get("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise _Wrong("Parameter 'cache_salt' must be a non-empty string if provided.")
    if len(salt) > _MOST_SALT or not _NOT_IN_SALT.isdisjoint(salt):
        raise _Wrong("Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\'.")
    return salt


def _head(asked: _Asked, *, stream: bool) -> dict[str, Any]:
    """Return what all chunks of an answer have in common."""
    kind = "text_completion" if not asked.chat else "chat.completion.chunk" if stream else "chat.completion"
    return {"id": asked.id, "object": kind, "created": asked.created, "model": "m"}


def _usage(asked: _Asked, made: int) -> dict[str, int]:
    prompt = len(asked.prompt)
    return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}


def _text_of(token: Token) -> str:
    return f" t{token.token}"


def _logprobs(asked: _Asked, made: Sequence[Token]) -> dict[str, Any]:
    values = [(_text_of(token), number(token.logprob)) for token in made]
    if asked.chat:
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []}
                for text, value in values
            ]
        }
    return {"tokens": [text for text, _ in values], "token_logprobs": [value for _, value in values]}
