"""The fixtures of `command_line.py`."""

from command_line import answer, chats, embedded, refused, run, world  # noqa: F401  # fixtures
