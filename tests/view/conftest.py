from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The index of rollouts is not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
