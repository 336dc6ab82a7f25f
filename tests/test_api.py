"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lockstep


def loaded_after(code: str) -> set[str]:
    heavy = {"torch", "transformers", "pydantic", "numpy"}
    script = f"import sys; {code}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert loaded_after("import lockstep; lockstep.__version__; dir(lockstep)") == set()
    assert loaded_after("from lockstep import load_run, GRPORun; load_run('tiny')") == {"pydantic"}
    assert "torch" in loaded_after("from lockstep import OnlineTrainer"), "the check can fail"


def test_every_public_name_is_the_one_that_its_module_defines() -> None:
    assert set(lockstep._HOMES) | {"__version__"} == set(lockstep.__all__)
    for name, home in lockstep._HOMES.items():
        if name in lockstep._REMOVED_IN_0_2:
            with pytest.warns(
                DeprecationWarning, match=f"lockstep.{name} will be removed in 0.2; use lockstep"
            ):
                value = getattr(lockstep, name)
        else:
            value = getattr(lockstep, name)
        assert (value.__module__, value.__name__) == (home, name)
        assert name in dir(lockstep)
    from lockstep import train

    assert train.__path__, "the package of train backends is not shadowed"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'trainer'; it has Builder, DPORun, .*train_online"
    ):
        _ = lockstep.trainer  # type: ignore[attr-defined]
