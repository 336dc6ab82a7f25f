import gc
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# A shell without job control starts background commands with SIGINT ignored, and children inherit that:
# the tests of Ctrl-C would then wait for an interrupt that never comes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast the machine is. (The environment of vLLM's tests has no hypothesis.)
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")


def pytest_configure(config: pytest.Config) -> None:
    """With -n, keep the tests of a file in one process: spread over two, each makes what a module-scoped
    fixture makes, such as a launch of ranks that trains every stack."""
    if getattr(config.option, "dist", None) == "load":
        config.option.dist = "loadfile"


def pytest_collection(session: pytest.Session) -> None:
    """Importing every test's modules makes a million objects that stay: looking for garbage among them finds
    none."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Nor is there garbage among them later on: each full collection of a test looks at what is newer."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def process_groups_end_with_their_file() -> Iterator[None]:
    """A run of one process leaves torch's process group behind, and the next file may want to make its
    own."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads single bytes, with a chat template."""
    example = Path(__file__).resolve().parents[1] / "examples" / "tiny_text_model.py"
    spec = importlib.util.spec_from_file_location("tiny_text", example)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(module.save(tmp_path_factory.mktemp("model") / "tiny"))
