"""The loop and its parts: trees, verification, sampling, caches, the target, and what a drafter is."""
