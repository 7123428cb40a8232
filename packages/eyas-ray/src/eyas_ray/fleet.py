"""The application of Ray Serve, and a fleet on this machine."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve

from eyas.errors import EyasError
from eyas_ray.data import on_shared_cluster
from eyas_ray.gate import CALLBACK
from eyas_ray.options import APPLICATION, DEPLOYMENT, Fleet, deployment_options
from eyas_ray.replica import Replica, Server

__all__ = ["application", "local_fleet", "run_until_signal"]

IDLE_SECONDS = 620  # of a connection, as in `eyas.serve.server`
MISTAKE = re.compile(r"eyas\.errors\.\w+: (.+)")
VARIABLES = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": CALLBACK,
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere unless the user says so
}


def application(make: Callable[[], Server], fleet: Fleet) -> Any:
    """Return the application for `serve.run`, and for `serve deploy` by an import path."""
    deployment = serve.deployment(serve.ingress()(Replica), **deployment_options(fleet))
    return deployment.bind(make)


@contextmanager
def local_fleet(make: Callable[[], Server], fleet: Fleet, host: str, port: int) -> Iterator[None]:
    """Serve on this address while the block runs.

    Ray is started on this machine, unless RAY_ADDRESS names a cluster. At the end the replicas have `fleet.drain`
    seconds for running answers. Other applications of that cluster are left alone.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    most = fleet.max_replicas or fleet.replicas
    own = {} if on_shared_cluster() else {"num_cpus": most * fleet.cpus, "include_dashboard": False}
    ray.init(log_to_driver=False, **own)
    try:
        options = {"host": host, "port": port, "keep_alive_timeout_s": IDLE_SECONDS}
        serve.start(proxy_location="HeadOnly", http_options=options)
        try:
            _run(application(make, fleet))
            yield
        finally:
            serve.delete(APPLICATION)
            if not serve.status().applications:
                serve.shutdown()
    finally:
        ray.shutdown()


def _run(app: Any) -> None:
    """Run the application. EyasError where a replica cannot be made by a mistake of the user's, which Ray tells of the
    deployment, within a traceback."""
    try:
        serve.run(app, name=APPLICATION)
    except RuntimeError as error:
        told = MISTAKE.findall(serve.status().applications[APPLICATION].deployments[DEPLOYMENT].message)
        if not told:
            raise
        raise EyasError(told[-1]) from error


def run_until_signal() -> None:
    """Wait for SIGTERM or Ctrl-C."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
