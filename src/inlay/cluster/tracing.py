"""Spans of OpenTelemetry, if it is installed and Serve's `tracing_config` enables it; otherwise nothing happens."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inlay.cluster.placement import Placement
    from inlay.runtime.request import Request

try:
    from opentelemetry import propagate, trace
except ImportError:  # the extra `tracing` is not installed
    trace = propagate = None


@contextmanager
def span(name: str, placement: Placement, request: Request) -> Iterator[Callable[..., None]]:
    """Record a span with the id of the request; yield a function that adds attributes. A child of the sender's span.

    The span is not the current one of the context: a generator that Serve calls may be resumed in another context.
    """
    if trace is None:
        yield lambda **attributes: None
        return
    parent = propagate.extract(placement.trace) if placement.trace else None
    made = trace.get_tracer("inlay").start_span(name, parent, attributes={"request_id": request.id})
    made.set_attribute("inlay.attempt", placement.request_id)
    propagate.inject(placement.trace, trace.set_span_in_context(made))
    try:
        yield lambda **attributes: made.set_attributes({f"inlay.{key}": value for key, value in attributes.items()})
    except BaseException as error:
        if isinstance(error, Exception):
            made.record_exception(error)
        raise
    finally:
        made.end()


def current_trace() -> dict[str, str]:
    """Return the W3C trace context of the current span; empty without tracing."""
    carrier: dict[str, str] = {}
    if trace is not None:
        propagate.inject(carrier)
    return carrier
