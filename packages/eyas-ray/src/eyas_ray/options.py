"""The number of replicas, the resources of each, and their settings for Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eyas.errors import OptionError
from eyas_ray.scaling import POLICY

__all__ = ["APPLICATION", "DEPLOYMENT", "Fleet", "deployment_options"]

APPLICATION = DEPLOYMENT = "eyas"  # their names in Ray Serve
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The replicas of one server.

    Attributes:
        replicas: how many there are; with `max_replicas`, how many there are at least.
        max_replicas: how many there may be under load; None: no more than `replicas`.
        rows: sequences that one replica decodes together.
        queue: requests that may wait before the replicas; one more gets status 429.
        drain: seconds that running answers have when a replica ends.
        cpus: cores of one replica, by which Ray chooses its place and the number of its threads.
        gpus: GPUs of one replica.
        sticky: whether requests of a session go to one replica, which holds their prefix.
        draft: the head that replaces the one of the server's options; None: that one.
    """

    replicas: int = 1
    max_replicas: int | None = None
    rows: int = 8
    queue: int = 256
    drain: float = 60.0
    cpus: float = 1
    gpus: float = 0
    sticky: bool = True
    draft: str | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise OptionError(f"a fleet needs one replica or more, not {self.replicas}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise OptionError(f"{self.max_replicas} replicas at most are fewer than {self.replicas}")


def deployment_options(fleet: Fleet) -> dict[str, Any]:
    """Return the options of `ray.serve.deployment`.

    Up to twice as many requests as rows go to a replica, so that none of its rows is ever empty while requests
    wait. The others wait before the replicas: they go to any replica that has room, also if one dies.
    """
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "max_ongoing_requests": 2 * fleet.rows,
        "max_queued_requests": fleet.queue,
        "backpressure_config": {"status_code": 429, "retry_after_s": 1},
        "graceful_shutdown_timeout_s": fleet.drain,
        "health_check_period_s": 5,
        "ray_actor_options": {"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        **_count(fleet),
    }
    if fleet.sticky:
        options["request_router_config"] = {"request_router_class": ROUTER}
    if fleet.draft is not None:
        options["user_config"] = {"draft": fleet.draft}
    return options


def _count(fleet: Fleet) -> dict[str, Any]:
    """Return the number of replicas, or how it follows the load: one more when all rows of each are taken."""
    if fleet.max_replicas is None or fleet.max_replicas == fleet.replicas:
        return {"num_replicas": fleet.replicas}
    scaling = {
        "min_replicas": fleet.replicas,
        "max_replicas": fleet.max_replicas,
        "target_ongoing_requests": fleet.rows,
        "policy": {"policy_function": POLICY},
    }
    return {"autoscaling_config": scaling}
