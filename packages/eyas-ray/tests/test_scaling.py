"""A fleet that grows under load and shrinks again, live. Skipped where Ray is not installed: `make scale` installs it."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

import live
from processes import unused_port

ray = pytest.importorskip("ray", reason="Ray is installed by `make scale`")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own modules use deprecated parts of pydantic
    from ray import serve

from eyas_ray.fleet import VARIABLES  # noqa: E402
from eyas_ray.options import APPLICATION, DEPLOYMENT, Fleet, deployment_options  # noqa: E402
from eyas_ray.replica import Replica  # noqa: E402
from eyas_ray.serving import Maker, arguments_of  # noqa: E402 - what follows needs Ray

pytestmark = [*live.MARKS, live.EMBEDDED]

ROWS, SEQUENCES, LOOKS = 2, 4, 600
QUICK = {"upscale_delay_s": 1, "downscale_delay_s": 3, "metrics_interval_s": 0.5, "look_back_period_s": 2}


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fleet of one replica, and of two under load, with short delays."""
    for name, value in VARIABLES.items():
        monkeypatch.setitem(os.environ, name, value)
    options = deployment_options(Fleet(replicas=1, max_replicas=2, rows=ROWS))
    options["autoscaling_config"] |= QUICK
    make = Maker(arguments_of({"rows": ROWS, "tree.nodes": 6, "tree.depth": 3}))
    port = unused_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(serve.deployment(serve.ingress()(Replica), **options).bind(make), name=APPLICATION)
        yield f"http://127.0.0.1:{port}/v1/completions"
        serve.shutdown()
    finally:
        ray.shutdown()


def running() -> int:
    """The replicas that serve."""
    states = serve.status().applications[APPLICATION].deployments[DEPLOYMENT].replica_states
    return states.get("RUNNING", 0)


def has_become(count: int) -> bool:
    """Whether there are so many replicas, now or after a while."""
    for _ in range(LOOKS):
        if running() == count:
            return True
        time.sleep(0.5)
    return False


def test_a_fleet_grows_and_shrinks(url: str) -> None:
    """Guards the policy with Ray's real figures: one request, whose sequences are more than a replica has rows for,
    starts a second replica, and one is left when nobody asks. Every answer is whole and the same."""
    enough = threading.Event()

    def client() -> list[str]:
        texts = list[str]()
        body = {"prompt": "Tell me a story.", "n": SEQUENCES, "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        with httpx2.Client(timeout=600) as http:
            while not enough.is_set():
                answer = http.post(url, json=body)
                answer.raise_for_status()
                texts += [choice["text"] for choice in answer.json()["choices"]]
        return texts

    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(client)
        grown = has_become(2)
        enough.set()
        texts = asked.result()
    assert grown
    assert len(texts) >= SEQUENCES
    assert len(texts) % SEQUENCES == 0
    assert len(set(texts)) == 1
    assert has_become(1)
