"""`eyas.train`, the name under which the package `eyas_train` was once imported: both names give the same modules.

It does not know the modules of eyas-train.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from eyas.elsewhere import part


class _Forwarding(MetaPathFinder, Loader):
    """Finds `eyas.train.NAME` as the module NAME of the package that the part "adapt" is in."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module: ModuleType) -> None:
        moved = module.__name__.replace(__name__, _package, 1)
        sys.modules[module.__name__] = import_module(moved)


_package = part("adapt", __name__).__package__.split(".")[0]
sys.modules[__name__] = import_module(_package)
sys.meta_path.insert(0, _Forwarding())
