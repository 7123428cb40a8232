"""What Ray Serve is told about a fleet, and the page with the metrics of all replicas. Ray is not needed."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.errors import OptionError
from eyas_ray.options import Fleet, deployment_options
from eyas_ray.pages import merged
from eyas_ray.replica import FleetApp
from eyas_ray.scaling import POLICY, by_sequences

PAGE = """# HELP a_total What is counted.
# TYPE a_total counter
a_total{model="m"} 1.0
# HELP b A gauge.
# TYPE b gauge
b 2.0
"""


def test_fixed_and_scaled_fleets() -> None:
    """Guards against a number of replicas and a policy for it at once, which Ray refuses."""
    fixed = deployment_options(Fleet(replicas=2, rows=4))
    scaled = deployment_options(Fleet(replicas=2, max_replicas=6, rows=4, sticky=False, draft="head"))
    assert fixed["num_replicas"] == 2
    assert "autoscaling_config" not in fixed
    assert "num_replicas" not in scaled
    assert scaled["autoscaling_config"] == {
        "min_replicas": 2, "max_replicas": 6, "target_ongoing_requests": 4, "policy": {"policy_function": POLICY},
    }  # fmt: skip
    assert "request_router_config" in fixed
    assert "request_router_config" not in scaled
    assert scaled["user_config"] == {"draft": "head"}


@pytest.mark.parametrize(
    ("running", "waiting", "before", "replicas"),
    [((4, 4), (0, 0), 0, 2), ((4, 1), (3, 0), 5, 4), ((0, 0), (0, 0), 0, 0)],
)
def test_replicas_for_the_sequences(
    running: tuple[int, int], waiting: tuple[int, int], before: int, replicas: int
) -> None:
    """Guards against counting requests: one with eight samples takes eight rows."""
    figures = {"running": running, "waiting": waiting, "rows": (4, 4)}
    context = SimpleNamespace(
        aggregated_metrics={name: dict(zip("ab", values, strict=True)) for name, values in figures.items()},
        total_queued_requests=before, target_num_replicas=7,
    )  # fmt: skip
    assert by_sequences(context) == (replicas, {})
    context.aggregated_metrics = None
    assert by_sequences(context) == (7, {})


@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"replicas": 3, "max_replicas": 2}])
def test_impossible_fleets(wrong: dict[str, int]) -> None:
    """Guards against a fleet that Ray refuses in its own words, much later."""
    with pytest.raises(OptionError):
        Fleet(**wrong)


def test_one_page_of_all_replicas() -> None:
    """Guards against two descriptions of one metric, with which Prometheus drops the page, and samples that look the
    same."""
    assert merged({"x": PAGE, "y": PAGE}).splitlines() == [
        "# HELP a_total What is counted.",
        "# TYPE a_total counter",
        'a_total{replica="x",model="m"} 1.0',
        'a_total{replica="y",model="m"} 1.0',
        "# HELP b A gauge.",
        "# TYPE b gauge",
        'b{replica="x"} 2.0',
        'b{replica="y"} 2.0',
    ]


def ask(method: str, path: str, status: int, results: list[Any]) -> tuple[int, Any, list[Any]]:
    """The answer of a replica's application, and what it told the others."""
    told: list[Any] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"head": "new", "own": path}).encode()})

    async def tell(*call: Any) -> list[Any]:
        told.append(call)
        return results

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(FleetApp(app, tell)({"type": "http", "method": method, "path": path}, None, send))
    return sent[0]["status"], sent[1]["body"], told


def test_a_new_head_goes_to_every_replica() -> None:
    """Guards against one replica of many with the new head, and against a head that a replica has refused."""
    status, body, told = ask("POST", "/v1/draft", 200, [None, None])
    assert (status, told) == (200, [("change_head", "new")])
    assert json.loads(body)["head"] == "new"
    status, body, _ = ask("POST", "/v1/draft", 200, [None, RuntimeError("no such folder")])
    assert status == 500
    assert "1 of 2 replicas kept their head: no such folder" in json.loads(body)["error"]["message"]
    assert ask("POST", "/v1/draft", 403, [])[::2] == (403, [])


def test_metrics_of_every_replica() -> None:
    """Guards against counters that jump between replicas from one scrape to the next."""
    status, body, _ = ask("GET", "/metrics", 200, [("x", PAGE), RuntimeError("it has just died"), ("y", PAGE)])
    assert status == 200
    assert body.decode() == merged({"x": PAGE, "y": PAGE})


def test_a_refusal_is_the_servers() -> None:
    """Guards against a foreign web page that reads the metrics of a fleet, which its server refuses to that host."""
    assert ask("GET", "/metrics", 403, [("x", PAGE)])[::2] == (403, [])
    assert ask("GET", "/v1/models", 200, [])[2] == []  # other paths are the server's own
