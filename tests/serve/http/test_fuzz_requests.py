"""Requests made up from the server's own OpenAPI schema, right ones and wrong ones: no answer is a 5xx.

What comes back has the status, the content type and the form that the schema says.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.serve.server_process import NAME, SECONDS, Server

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WEIGHTS = {"/v1/chat/completions": 10, "/v1/completions": 8}
"""How many cases there are of a route for one of another."""
UNSOUND = [positive_data_acceptance, negative_data_rejection]
"""Limits are not in a schema; and what is wrong in one of several forms may be right in another."""


@pytest.fixture(scope="module")
def brief(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers are short, as there are many."""
    with Server(package, tmp_path_factory.mktemp("log"), "--max-tokens", "3") as running:
        yield running


def _put(server: Server, cases: int) -> Counter[int]:
    """So many cases of a plain route; the statuses they got."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=SECONDS)
    statuses: Counter[int] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == "/v1/kv_cache/events":
            continue  # never ends

        @hypothesis.settings(
            max_examples=cases * WEIGHTS.get(operation.path, 1),
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(
            case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
            | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)
        )
        def put(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = NAME  # no made-up name gets any further
            response = case.call(base_url=server.url, timeout=SECONDS)
            statuses[response.status_code] += 1
            case.validate_response(response, excluded_checks=UNSOUND)

        put()
    return statuses


def test_some_hundred(brief: Server) -> None:
    statuses = _put(brief, 20)
    print(statuses)
    assert sum(statuses.values()) > 300
    assert statuses[200] > 20
    assert statuses[400] > 20
    assert max(statuses) < 500


@pytest.mark.nightly
def test_twenty_thousand(brief: Server) -> None:
    statuses = _put(brief, 1_200)
    print(statuses)
    assert sum(statuses.values()) >= 20_000
    assert max(statuses) < 500
