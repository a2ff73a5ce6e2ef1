"""What the gateway counts; docs/gateway.md lists it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from .gate import GateState

__all__ = ["GatewayMetrics"]

_SHUT_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class GatewayMetrics:
    """Prometheus metrics; gauges are set when they are asked for."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._running = Gauge("gateway_running", "Requests that the engine works on.", registry=registry)
        self._held = Gauge("gateway_held", "Requests that wait for the gate.", registry=registry)
        self._shut = Gauge("gateway_shut", "1 while the gate is shut.", registry=registry)
        self.requests = Counter("gateway_requests", "Requests let in.", registry=registry)
        self.refused = Counter("gateway_refused", "Requests not let in.", ["reason"], registry=registry)
        self.lost = Counter("gateway_lost", "Answers that did not come whole.", ["reason"], registry=registry)
        self.over_updates = Counter("gateway_over_updates", "Answers by more than one version.", registry=registry)
        self.left = Counter("gateway_left", "Requests whose client left first.", registry=registry)
        self.shut_seconds = Histogram(
            "gateway_shut_seconds", "Seconds from shutting to opening.", registry=registry, buckets=_SHUT_SECONDS
        )

    def text(self, state: GateState) -> bytes:
        """Return everything in Prometheus' text format."""
        self._running.set(state.in_flight)
        self._held.set(state.held)
        self._shut.set(state.shut)
        return generate_latest(self._registry)
