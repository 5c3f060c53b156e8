"""Spans of OpenTelemetry. They are recorded if Serve's `tracing_config` enables it; otherwise nothing happens."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import propagate, trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from inlay.cluster.placement import Placement
    from inlay.runtime.request import Request


@contextmanager
def span(name: str, placement: Placement, request: Request) -> Iterator[trace.Span]:
    """Record a span with the id of the request: a child of the sender's span, or else of the current one.

    It is not the current one of the context: a generator that Serve calls may be resumed in another context.
    """
    parent = propagate.extract(placement.trace) if placement.trace else None
    attributes = {"request_id": request.id, "inlay.attempt": placement.request_id}
    made = trace.get_tracer("inlay").start_span(name, parent, attributes=attributes)
    propagate.inject(placement.trace, trace.set_span_in_context(made))
    try:
        yield made
    except Exception as error:
        made.record_exception(error)
        raise
    finally:
        made.end()
