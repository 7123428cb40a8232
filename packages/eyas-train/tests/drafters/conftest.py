"""The fixtures of `heads.py`."""

from heads import answered, target  # noqa: F401  # fixtures
