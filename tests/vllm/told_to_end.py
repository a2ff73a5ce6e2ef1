"""What vLLM's workers load in these tests: a request that lasts until it is told to end, however fast the machine is.

A request whose ``vllm_xargs`` have ``end_when`` takes at least ``STEP`` seconds for a token, and its next token is its
stop token once a file of that name is there. All other requests are left alone.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch  # noqa: TC002 - vLLM looks at the annotations
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

STEP = 0.02


class ToldToEnd(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        told = (params.extra_args or {}).get("end_when")
        return None if told is None else Ending(Path(told), params.stop_token_ids[0])


class Ending:
    def __init__(self, told, token):
        self._told = told
        self._token = token

    def __call__(self, tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP)
        if self._told.exists():
            logits.fill_(-math.inf)
            logits[self._token] = 0.0
        return logits
