import random

from lockstep.engine.native.extents import Extent, Extents


def test_the_first_gap_that_is_large_enough_is_taken():
    extents = Extents(100, first=1)
    a, b, c = (extents.allocate(n) for n in (10, 20, 30))
    assert [(e.start, e.size) for e in (a, b, c)] == [(1, 10), (11, 20), (31, 30)]
    extents.release(b)
    assert extents.allocate(21) == Extent(61, 21)
    assert extents.allocate(20) == Extent(11, 20)
    assert extents.free == 100 - 10 - 20 - 30 - 21
    assert extents.allocate(20) is None and extents.free == 19


def test_gaps_that_touch_become_one():
    extents = Extents(30)
    held = [extents.allocate(10) for _ in range(3)]
    for index in (0, 2, 1):
        extents.release(held[index])
    assert extents.allocate(30) == Extent(0, 30)


def test_an_extent_grows_in_place_only_into_free_rows():
    extents = Extents(30)
    a, b = extents.allocate(10), extents.allocate(10)
    assert not extents.extend(a, 11)
    assert not extents.extend(b, 21) and b.size == 10
    assert extents.extend(b, 20) and extents.free == 0
    extents.release(b)
    assert extents.extend(a, 25) and extents.free == 5 and extents.allocate(6) is None


def test_packing_leaves_one_gap_behind_all():
    extents = Extents(30, first=1)
    a, b, c = (extents.allocate(n) for n in (5, 5, 5))
    extents.release(b)
    c.size = 8
    extents.pack([a, c])
    assert (a.start, c.start, extents.free) == (1, 6, 17)
    assert extents.allocate(17) == Extent(14, 17)


def test_no_row_is_ever_given_twice():
    rng = random.Random(0)
    extents, held = Extents(200, first=1), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            extents.release(held.pop(rng.randrange(len(held))))
        elif rng.random() < 0.7:
            new = extents.allocate(rng.randint(1, 40))
            held += [] if new is None else [new]
        elif held:
            extents.extend(one := rng.choice(held), one.size + rng.randint(1, 10))
        rows = [row for e in held for row in range(e.start, e.stop)]
        assert len(rows) == len(set(rows)) and all(1 <= row <= 200 for row in rows)
        assert extents.free == 200 - len(rows)
