"""The receiver's Prometheus metrics; docs/operations.md lists them."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .activation import Outcome

__all__ = ["Metrics"]

_STAGE_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

_GAUGES = {
    "version": "Version in the live slot.",
    "target_version": "Version wanted.",
    "lag_versions": "Versions between the two.",
    "target_age_seconds": "Seconds since the wanted version was published, by this host's clock.",
    "ready": "1 while the wanted version is served.",
    "latched": "1 while the engine is held because neither version could be loaded and confirmed.",
    "pinned": "1 while an operator's pin takes the place of --target.",
    "paused": "1 while following is paused.",
    "seconds_since_success": "Seconds since the last pass without an error.",
    "scrub_passed_timestamp_seconds": "When all chunks of the live slot were last read over.",
}


class Metrics:
    """Everything that is counted; gauges are set when they are asked for."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._gauges = {name: Gauge(f"receiver_{name}", text, registry=registry) for name, text in _GAUGES.items()}
        self.fetched = Counter("receiver_fetched_bytes", "Bytes of parts downloaded.", registry=registry)
        self.written = Counter("receiver_written_bytes", "Bytes of checkpoints written.", registry=registry)
        self.patches = Counter("receiver_patches", "Versions put in place.", registry=registry)
        self.repairs = Counter("receiver_repairs", "Damaged chunks mended.", registry=registry)
        self.failures = Counter("receiver_failures", "Failures by kind.", ["kind"], registry=registry)
        self.retries = Counter("receiver_retries", "Passes, and requests, tried again.", ["of"], registry=registry)
        self.activations = Counter("receiver_activations", "Activations.", ["outcome"], registry=registry)
        self.heartbeats = Counter("receiver_heartbeats", "Heartbeats.", ["outcome"], registry=registry)
        self.stage_bytes = Counter("receiver_stage_bytes", "Bytes by stage.", ["stage"], registry=registry)
        self.seconds = Histogram(
            "receiver_stage_seconds", "Seconds by stage.", ["stage"], registry=registry, buckets=_STAGE_SECONDS
        )

        # Those whose labels are known begin at 0: a counter that appears with its first count has no rate.
        for counter, labels in (
            (self.retries, ("pass", "request")),
            (self.heartbeats, ("sent", "failed")),
            (self.activations, get_args(Outcome)),
        ):
            for label in labels:
                counter.labels(label)

    def worked(self, stage: str, count: int) -> None:
        """Count bytes that went through a stage."""
        self.stage_bytes.labels(stage).inc(count)
        if stage == "patch":
            self.written.inc(count)

    def text(self, **values: float | None) -> bytes:
        """Set the gauges (to -1 where nothing is known) and return everything in Prometheus' text format."""
        for name, value in values.items():
            self._gauges[name].set(-1 if value is None else value)
        return generate_latest(self._registry)
