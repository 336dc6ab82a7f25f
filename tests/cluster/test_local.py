"""This machine as a provider, through the same launch as Ray's."""

from pathlib import Path

import pytest

from lockstep.cluster.launch import check_nodes, launch_on
from lockstep.cluster.local import LocalProvider
from lockstep.errors import ConfigError
from lockstep.protocols.cluster import Placement


def test_ranks_get_their_places(tmp_path: Path) -> None:
    script = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK')))"
    placement = Placement(nodes=1, per_node=2)
    provider = LocalProvider(log_dir=tmp_path)
    assert launch_on(provider, ["-c", script], placement=placement, log_dir=tmp_path) == 0
    assert [(tmp_path / f"rank-{rank}.log").read_text() for rank in (0, 1)] == ["0 0 2 0\n", "1 1 2 0\n"]


def test_a_rank_that_dies_ends_the_others_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import os, time; os.environ['RANK'] == '1' and os.abort(); time.sleep(600)"
    placement = Placement(nodes=1, per_node=2)
    provider = LocalProvider(log_dir=tmp_path)
    assert launch_on(provider, ["-c", script], placement=placement, log_dir=tmp_path) == 134
    assert "rank 1 of 2 was killed by SIGABRT" in capsys.readouterr().err


def test_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    provider = LocalProvider(log_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"cluster\.nodes = 2"):
        check_nodes(provider, Placement(nodes=2, per_node=1))
    with pytest.raises(ConfigError, match=r"cluster\.gpus = 1"):
        check_nodes(provider, Placement(nodes=1, per_node=1, gpus=True))
