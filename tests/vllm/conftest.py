"""Real vLLM servers, in the environment that ``make test-vllm`` builds. A run without it skips these tests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import tiny_llama
from vllm_server import run_vllm

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("DELTASTORE_VLLM_PYTHON")
    if not python:
        pytest.skip("needs vLLM in an environment of its own: make test-vllm")
    return python


@pytest.fixture(scope="session")
def start_vllm(vllm_python, tmp_path_factory):
    """A context manager that serves a checkpoint."""
    logs = tmp_path_factory.mktemp("vllm")
    return lambda checkpoint, *arguments: run_vllm(vllm_python, checkpoint, logs / "server.log", *arguments)


@pytest.fixture(scope="session")
def states(vllm_python) -> list[dict[str, object]]:
    """The weights of a base and of two steps after it."""
    made = [tiny_llama.random_state(1)]
    for seed in (2, 3):
        made.append(tiny_llama.next_state(made[-1], seed))
    return made


@pytest.fixture(scope="session")
def versions(states, tmp_path_factory) -> list[Path]:
    """The same as directories."""
    parent = tmp_path_factory.mktemp("checkpoints")
    return [tiny_llama.write_checkpoint(parent / f"v{number}", state) for number, state in enumerate(states)]
