import pytest

from .fakes import engine_in


@pytest.fixture
def engines(tmp_path):
    """engines(plan of each start, ..., spec={...}, config=...): closed after the test."""
    made = []

    def make(*starts, **settings):
        made.append(engine_in(tmp_path, *starts, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
