"""Which device is whose, against numbers worked by hand."""

from __future__ import annotations

import pytest

from lockstep.config.cluster import NodeLayout


@pytest.mark.parametrize(
    ("layout", "total", "groups", "engines"),
    [
        (NodeLayout(ranks=1), 1, [(0,)], [()]),
        (NodeLayout(ranks=4), 4, [(0, 1, 2, 3), (0, 1, 2, 3)], [(), (), (), ()]),
        (NodeLayout(ranks=1, remote_groups=1), 2, [(1,)], [()]),
        (NodeLayout(ranks=2, remote_groups=1), 4, [(2, 3)], [(), ()]),
        (NodeLayout(ranks=2, remote_groups=3), 8, [(2, 3), (4, 5), (6, 7)], [(), ()]),
        (NodeLayout(ranks=1, engine=1), 2, [(0,)], [(1,)]),
        (NodeLayout(ranks=2, engine=3), 8, [(0, 1)], [(2, 3, 4), (5, 6, 7)]),
        (NodeLayout(ranks=2, remote_groups=2, engine=2), 10, [(2, 3), (4, 5)], [(6, 7), (8, 9)]),
    ],
)
def test_devices(
    layout: NodeLayout, total: int, groups: list[tuple[int, ...]], engines: list[tuple[int, ...]]
) -> None:
    assert layout.total == total
    assert [layout.of_group(number) for number in range(len(groups))] == groups
    assert [layout.of_engine(rank) for rank in range(layout.ranks)] == engines
    apart = [device for group in groups if layout.remote_groups for device in group]
    used = [*range(layout.ranks), *apart, *(device for engine in engines for device in engine)]
    assert sorted(used) == list(range(total)), "each has one owner"
