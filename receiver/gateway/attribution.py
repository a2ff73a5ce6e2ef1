"""Which version made which tokens of one answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["Attribution", "Spans"]


@dataclass(slots=True)
class Spans:
    """Runs of tokens by the same weights, first to last."""

    runs: list[tuple[str, int, int]]

    @property
    def total(self) -> int:
        """How many tokens there are so far."""
        return self.runs[-1][2] if self.runs else 0

    def add(self, count: int, label: str) -> None:
        """Append tokens made by the weights of ``label``."""
        if count <= 0:
            return
        total = self.total
        if self.runs and self.runs[-1][0] == label:
            self.runs[-1] = (label, self.runs[-1][1], total + count)
        else:
            self.runs.append((label, total, total + count))


class Attribution:
    """Counts the tokens of an answer, and of each of its choices, as they pass.

    A chunk counts for as many tokens as it says (``token_ids``, ``logprobs``, or the total in ``completion_tokens``);
    one that says nothing, and has text, counts for one.
    """

    def __init__(self, start: str) -> None:
        self.start = start
        self.end = start
        self.choices: dict[int, Spans] = {}

    def count(self, chunk: object, label: str) -> bool:
        """Count a chunk of a stream, parsed; tells whether it is one that ends a choice, or comes after all of them."""
        if not isinstance(chunk, dict):
            return False
        choices = chunk.get("choices")
        if isinstance(choices, list):
            return self._count_choices(chunk, choices, label)
        meta = chunk.get("meta_info")
        if isinstance(meta, dict):
            self._reach(_number(chunk.get("index")), meta.get("completion_tokens"), label)
            return meta.get("finish_reason") is not None
        if chunk.get("token") is not None:
            self._add(0, 1, label)
        return False

    def passed(self, label: str) -> None:
        """Note that a part of the answer was made by the weights of ``label``, tokens or not."""
        self.end = label

    def fields(self, *, spans: bool) -> bytes:
        """Return what is added to the answer, as members of a JSON object without its braces."""
        told: dict[str, Any] = {"weight_version_start": self.start, "weight_version_end": self.end}
        if spans:
            told["weight_version_spans"] = self.spans()
        return msgspec.json.encode(told)[1:-1]

    def spans(self) -> list[dict[str, Any]]:
        """Return the runs of all choices; ``choice`` says of which, where there are several."""
        several = len(self.choices) > 1
        return [
            {"version": label, "start": start, "end": end, **({"choice": choice} if several else {})}
            for choice, spans in sorted(self.choices.items())
            for label, start, end in spans.runs
        ]

    def _count_choices(self, chunk: dict[str, Any], choices: list[Any], label: str) -> bool:
        usage = chunk.get("usage")
        total = usage.get("completion_tokens") if isinstance(usage, dict) else None
        ends = not choices and usage is not None
        index = 0
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            index = _number(choice.get("index"))
            self._add(index, _tokens_in(choice), label)
            ends = ends or choice.get("finish_reason") is not None
        if len(choices) == 1:
            self._reach(index, total, label)  # usage beside a choice is of that choice
        elif not choices and self.choices.keys() == {0} and len(self.choices[0].runs) == 1:
            # All of one version: the engine's total is the better count.
            self._reach(0, total, self.choices[0].runs[0][0])
        return ends

    def _add(self, choice: int, count: int, label: str) -> None:
        if count > 0:
            self.choices.setdefault(choice, Spans([])).add(count, label)
            self.end = label

    def _reach(self, choice: int, total: object, label: str) -> None:
        if isinstance(total, int):
            have = self.choices[choice].total if choice in self.choices else 0
            self._add(choice, total - have, label)


def _tokens_in(choice: dict[str, Any]) -> int:
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        logprobs = logprobs.get("content") or logprobs.get("tokens")
    for told in (choice.get("token_ids"), logprobs):
        if isinstance(told, list) and told:
            return len(told)
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else choice
    text = ("text", "content", "reasoning_content", "reasoning", "tool_calls", "refusal")
    return 1 if any(said.get(name) for name in text) else 0


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 20 else 0
