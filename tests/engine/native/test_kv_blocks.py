import random

from lockstep.engine.native.kv_cache import KVBlock, KVBlockAllocator


def test_the_first_gap_that_is_large_enough_is_taken():
    allocator = KVBlockAllocator(100, first=1)
    a, b, c = (allocator.allocate(n) for n in (10, 20, 30))
    assert [(e.start, e.size) for e in (a, b, c)] == [(1, 10), (11, 20), (31, 30)]
    allocator.release(b)
    assert allocator.allocate(21) == KVBlock(61, 21)
    assert allocator.allocate(20) == KVBlock(11, 20)
    assert allocator.free == 100 - 10 - 20 - 30 - 21
    assert allocator.allocate(20) is None and allocator.free == 19


def test_gaps_that_touch_become_one():
    allocator = KVBlockAllocator(30)
    held = [allocator.allocate(10) for _ in range(3)]
    for index in (0, 2, 1):
        allocator.release(held[index])
    assert allocator.allocate(30) == KVBlock(0, 30)


def test_a_block_grows_in_place_only_into_free_rows():
    allocator = KVBlockAllocator(30)
    a, b = allocator.allocate(10), allocator.allocate(10)
    assert not allocator.extend(a, 11)
    assert not allocator.extend(b, 21) and b.size == 10
    assert allocator.extend(b, 20) and allocator.free == 0
    allocator.release(b)
    assert allocator.extend(a, 25) and allocator.free == 5 and allocator.allocate(6) is None


def test_packing_leaves_one_gap_behind_all():
    allocator = KVBlockAllocator(30, first=1)
    a, b, c = (allocator.allocate(n) for n in (5, 5, 5))
    allocator.release(b)
    c.size = 8
    allocator.pack([a, c])
    assert (a.start, c.start, allocator.free) == (1, 6, 17)
    assert allocator.allocate(17) == KVBlock(14, 17)


def test_no_row_is_ever_given_twice():
    rng = random.Random(0)
    allocator, held = KVBlockAllocator(200, first=1), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            allocator.release(held.pop(rng.randrange(len(held))))
        elif rng.random() < 0.7:
            new = allocator.allocate(rng.randint(1, 40))
            held += [] if new is None else [new]
        elif held:
            allocator.extend(one := rng.choice(held), one.size + rng.randint(1, 10))
        rows = [row for e in held for row in range(e.start, e.stop)]
        assert len(rows) == len(set(rows)) and all(1 <= row <= 200 for row in rows)
        assert allocator.free == 200 - len(rows)
