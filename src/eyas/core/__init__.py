"""The loop and its parts: trees, verification, sampling, caches, the target, the drafter interface."""
