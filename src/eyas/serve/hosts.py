"""`allowed_hosts` of auth.py, by the name of the module where it once was."""

from eyas.serve.auth import allowed_hosts

__all__ = ["allowed_hosts"]
