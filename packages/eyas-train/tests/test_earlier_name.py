"""`eyas.train`, the name under which eyas-train was once imported."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

import eyas_train.accelerate.plan
import eyas_train.loop
import processes


def test_both_names_give_the_same_modules() -> None:
    """Guards programs that were written for `eyas.train`, also where it is the first name that is imported. A second
    copy of a module has classes of its own, which `isinstance` and `except` in eyas_train do not know."""
    code = "from eyas.train import data; from eyas.train.loop import train; import eyas_train.data as new; assert data is new"
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert import_module("eyas.train.accelerate.plan") is eyas_train.accelerate.plan
    assert eyas_train.loop.__spec__.name == "eyas_train.loop"  # what importlib.reload reads
    with pytest.raises(ModuleNotFoundError, match=r"eyas_train\.nothing"):
        import_module("eyas.train.nothing")
