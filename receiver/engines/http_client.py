"""Calls to an engine's HTTP server, with whatever can go wrong on the way told as ``EngineError``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import httpx

from deltastore.errors import EngineError
from deltastore.tokens import read_token
from receiver.config import shown_url

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TOKEN_NAME", "EngineClient", "NoAnswer", "NotDone", "NotThere", "whole_answer"]

TOKEN_NAME: Final = "RECEIVER_ENGINE_TOKEN"  # noqa: S105 - the name, not the token
_TRIES = 5  # connections that were closed while they stood idle; more than the pool ever holds
_SHOWN = 300  # characters of an answer in a message
_MOST_BYTES = 64 << 20  # of an answer


def whole_answer(client: httpx.Client, method: str, url: str, *, seconds: float, **words: Any) -> httpx.Response:
    """Send a request and return its whole answer; httpx's own time-outs begin anew with every byte.

    Raises ``httpx.ReadTimeout`` where more than ``seconds`` passed, ``httpx.DecodingError`` where it is too large, and
    what httpx raises.
    """
    until = time.monotonic() + seconds
    content = bytearray()
    with client.stream(method, url, **words) as response:
        for piece in response.iter_bytes():
            content += piece
            if len(content) > _MOST_BYTES:
                raise httpx.DecodingError(f"the answer is over {_MOST_BYTES} bytes")
            if time.monotonic() > until:
                raise httpx.ReadTimeout("the answer does not end")
    kind = response.headers.get("content-type")
    return httpx.Response(
        response.status_code,
        headers={} if kind is None else {"content-type": kind},
        content=bytes(content),
        request=response.request,
    )


class NoAnswer(EngineError):
    """No answer came in time; whether the call was carried out is not known."""


class NotDone(EngineError):
    """The server says that it did not succeed, with status 200 and ``"success": false``."""


class NotThere(EngineError):
    """The server has no such endpoint."""


class EngineClient:
    """One server. Thread-safe.

    Calls that may be carried out twice without harm go over kept connections: one that the server closed while it stood
    idle says nothing of the server, and the call is made again. All others get a connection of their own, and are
    never made again. ``hint`` is what an operator may do where nothing answers. A token for the server, where it wants
    one, is taken from the environment (``RECEIVER_ENGINE_TOKEN``).
    """

    def __init__(
        self, url: str, *, connect_timeout: float, hint: str, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._connect_timeout = connect_timeout
        self._hint = hint
        self._shown = shown_url(self._url)
        token = read_token(TOKEN_NAME)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Proxies of the environment are for the outside world, not for the process next door.
        self._kept = httpx.Client(headers=headers, trust_env=False, transport=transport)
        single = httpx.Limits(max_keepalive_connections=0)
        self._single = httpx.Client(headers=headers, trust_env=False, transport=transport, limits=single)

    def close(self) -> None:
        """Close the connections; the server goes on."""
        self._kept.close()
        self._single.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        timeout: float,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        repeatable: bool = True,
    ) -> Mapping[str, Any]:
        """Make a call and return the object it is answered with.

        Raises ``NoAnswer``, ``NotThere``, ``NotDone``, and ``EngineError`` for all else.
        """
        response = self._send(method, path, timeout=timeout, query=query, body=body, repeatable=repeatable)
        try:
            answer = response.json()
        except (ValueError, RecursionError) as error:
            raise self.error(f"{path} answered something that is not JSON: {_shown(response.text)}") from error
        if not isinstance(answer, dict):
            answer = {"answer": answer}
        if answer.get("success", True) is not True:
            why = f"{path} says that it did not succeed: {_said(answer)}"
            raise NotDone(f"engine {self._shown}: {why}", key=self._shown, hint="See its log.")
        return answer

    def text(self, method: str, path: str, *, timeout: float, query: Mapping[str, str] | None = None) -> str:
        """Make a call that may be repeated and return its answer as it is. Raises as ``ask`` does."""
        return self._send(method, path, timeout=timeout, query=query).text

    def error(self, why: str, *, hint: str | None = None) -> EngineError:
        """Make an error about this server."""
        hint = hint or "See its log, and whether --engine and --engine-url fit what runs there."
        return EngineError(f"engine {self._shown}: {why}", key=self._shown, hint=hint)

    def _send(
        self,
        method: str,
        path: str,
        *,
        timeout: float,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
        repeatable: bool = True,
    ) -> httpx.Response:
        limits = httpx.Timeout(self._connect_timeout, read=timeout)
        try:
            response = self._request(method, path, limits, query, body, repeatable=repeatable)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise self.error(f"nothing answers there: {error}", hint=self._hint) from error
        except httpx.TimeoutException as error:
            raise NoAnswer(
                f"engine {self._shown}: no answer to {path} within {timeout:g} s",
                key=self._shown,
                hint="See its log; if it is only slow, give a longer timeout.",
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, RuntimeError) as error:
            # RuntimeError is what a closed client raises.
            raise self.error(f"{path} failed: {error or type(error).__name__}") from error
        if response.status_code == httpx.codes.NOT_FOUND:
            raise NotThere(f"engine {self._shown}: it has no {path}", key=self._shown, hint=self._hint)
        if not response.is_success:
            raise self.error(f"{path} answered {response.status_code}: {_reason(response)}")
        return response

    def _request(
        self,
        method: str,
        path: str,
        limits: httpx.Timeout,
        query: Mapping[str, str] | None,
        body: Mapping[str, object] | None,
        *,
        repeatable: bool,
    ) -> httpx.Response:
        client = self._kept if repeatable else self._single
        for tries_left in reversed(range(_TRIES)):
            connecting: list[str] = []

            def note(event: str, _: object, connecting: list[str] = connecting) -> None:
                if event == "connection.connect_tcp.started":
                    connecting.append(event)

            try:
                return whole_answer(
                    client,
                    method,
                    self._url + path,
                    seconds=limits.read or 0.0,
                    params=query,
                    json=body,
                    timeout=limits,
                    extensions={"trace": note},
                )
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                # The pool has dropped that connection now; only the failure of a new one counts.
                if not repeatable or connecting or not tries_left:
                    raise
        raise AssertionError


def _reason(response: httpx.Response) -> str:
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        return _shown(response.text)
    return _said(answer) if isinstance(answer, dict) else _shown(response.text)


def _said(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    found = error.get("message") if isinstance(error, dict) else error or answer.get("message") or answer.get("detail")
    return _shown(str(found or "no reason is given"))


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
