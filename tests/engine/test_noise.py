import math

import pytest
import torch

from lockstep.engine.sampling import BLOCK, exponential, noise_keys, sample_blocks

# splitmix64 of the reference C code (prng.di.unimi.it/splitmix64.c), seed 1234567: its first outputs
REFERENCE = [6457827717110365317, 3203168211198807973, 9817491932198370423]


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def draw(probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    weights = torch.zeros(len(seeds), -(-len(probs) // BLOCK) * BLOCK)
    weights[:, : len(probs)] = probs
    return sample_blocks(weights, noise_keys(seeds, positions))


def test_values_are_those_of_the_published_generator():
    signed = [value - (1 << 64) if value >> 63 else value for value in REFERENCE]
    uniform = [((value % (1 << 64)) >> 11) + 0.5 for value in signed]
    expected = torch.tensor([-math.log(u / 2**53) for u in uniform], dtype=torch.float64)
    got = exponential(torch.tensor([1234567]), torch.arange(3))[0]
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("vocab", [5, 600])
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_follow_the_probabilities(vocab, vary):
    n = 40_000
    probs = torch.softmax(torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5, -1)
    moving, fixed = torch.arange(n), torch.full((n,), 7)
    tokens = draw(probs, *((moving, fixed) if vary == "seed" else (fixed, moving)))
    counts = torch.bincount(tokens, minlength=vocab).double()
    # chi-square with V - 1 degrees of freedom: mean V - 1, standard deviation sqrt(2 (V - 1)); 5 of them
    limit = vocab - 1 + 5 * math.sqrt(2 * (vocab - 1))
    assert counts.sum() == n
    assert chi_square(counts, probs.double()) < limit


@pytest.mark.parametrize("other", [(1, 0), (0, 1), (1, 1), (1 << 32, 0), (0, 1 << 32)])
def test_neighbouring_seeds_and_positions_are_independent(other):
    n, vocab = 40_000, 4
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    seeds = torch.arange(n) * 2 + 11
    positions = torch.arange(n) % 50 * 2
    a = draw(probs, seeds, positions)
    b = draw(probs, seeds + other[0], positions + other[1])
    joint = torch.bincount(a * vocab + b, minlength=vocab * vocab).double()
    limit = 15 + 5 * math.sqrt(2 * 15)
    assert chi_square(joint, torch.outer(probs, probs).flatten().double()) < limit


def test_the_two_levels_are_independent():
    """Which block wins says nothing about which entry of it wins."""
    n = 40_000
    weights = torch.zeros(n, 2 * BLOCK)
    weights[:, [0, 1, BLOCK, BLOCK + 1]] = torch.tensor([1.0, 3.0, 2.0, 2.0])
    tokens = sample_blocks(weights, noise_keys(torch.arange(n), torch.zeros(n, dtype=torch.int64)))
    counts = torch.stack([(tokens == t).sum() for t in (0, 1, BLOCK, BLOCK + 1)]).double()
    assert chi_square(counts, torch.tensor([1.0, 3.0, 2.0, 2.0]).double() / 8) < 3 + 5 * math.sqrt(6)


def test_a_weight_of_zero_is_never_drawn():
    probs = torch.tensor([0.5, 0.0, 0.5, 0.0])
    tokens = draw(probs, torch.arange(5000), torch.zeros(5000, dtype=torch.int64))
    assert set(tokens.tolist()) == {0, 2}


def test_rows_do_not_depend_on_each_other():
    weights = torch.rand(6, 3 * BLOCK, generator=torch.Generator().manual_seed(0))
    keys = noise_keys(torch.arange(6) * 1000, torch.arange(6))
    together = sample_blocks(weights, keys)
    alone = torch.cat([sample_blocks(weights[i : i + 1], keys[i : i + 1]) for i in range(6)])
    assert together.tolist() == alone.tolist()
    assert len(set(together.tolist())) > 3
