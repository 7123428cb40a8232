"""What every test has: a cache folder of its own, so that nothing that was measured elsewhere is read, and nothing is left behind."""

from __future__ import annotations

import pytest

from eyas import kernels


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        kernels.available()  # compiled here, so that no test waits for it, or sees it said
        yield
