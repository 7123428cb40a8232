"""How many replicas the load asks for, by eyas' own figures: the policy of a fleet with `max_replicas`.

Ray counts requests; a replica's rows are taken by sequences. One request may have many (`n`, several
prompts), so requests say too little. Ray applies its delays, its factors and its bounds to the number that
`by_sequences` returns.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["POLICY", "by_sequences"]

POLICY = "eyas_ray.scaling:by_sequences"  # the import path of Ray's `policy_function`


def by_sequences(context: Any) -> tuple[int, dict[str, Any]]:
    """Return so many replicas that every sequence has a row, and no state.

    Args:
        context: Ray's `AutoscalingContext`. Its figures come from `Replica.record_autoscaling_stats`, by name
            and replica; until there are any, the number of replicas stays.
    """
    figures = context.aggregated_metrics or {}
    rows = list((figures.get("rows") or {}).values())
    if not rows:
        return context.target_num_replicas, {}
    inside = sum(sum((figures.get(name) or {}).values()) for name in ("running", "waiting"))
    before = context.total_queued_requests or 0  # requests that no replica has yet
    return math.ceil((inside + before) / max(rows)), {}
