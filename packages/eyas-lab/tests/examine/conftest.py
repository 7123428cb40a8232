"""The fixtures of `examined.py`."""

from examined import embedded, small  # noqa: F401  # fixtures
