"""The search for the smallest trial, on crashes that are plain functions."""

import pytest

from lockstep_lab.bisect.shrink import Crash, Trial, shrink

CRASH = Crash(type="ValueError", line="kernel.py:7")


def counted(crashes):
    calls = []

    def attempt(trial):
        calls.append(trial)
        return CRASH if crashes(trial) else None

    return attempt, calls


def test_a_document_longer_than_nine_tokens():
    attempt, calls = counted(lambda t: any(n > 9 for _, n in t.parts))
    found = shrink([5, 40, 3, 17, 2, 9], 32, attempt)
    assert found.trial.num_layers == 1 and [n for _, n in found.trial.parts] == [10]
    assert found.complete and found.trials == len(calls) <= 20 and found.crash == CRASH


def test_two_documents_of_equal_length():
    def crashes(trial):
        lengths = [n for _, n in trial.parts]
        return len(set(lengths)) < len(lengths)

    attempt, calls = counted(crashes)
    found = shrink([5, 12, 3, 12, 7, 30, 2, 9], 4, attempt)
    assert found.trial.parts == ((1, 1), (3, 1)) or [n for _, n in found.trial.parts] == [1, 1]
    assert len(calls) <= 30


@pytest.mark.parametrize("fewest", [1, 2, 7, 31, 32])
def test_fewest_layers(fewest):
    attempt, _ = counted(lambda t: t.num_layers >= fewest)
    found = shrink([6, 8], 32, attempt)
    assert found.trial == Trial(parts=found.trial.parts, num_layers=fewest)
    assert found.trial.tokens == 1 and len(found.trial.parts) == 1


def test_three_documents_that_are_needed_together():
    attempt, calls = counted(lambda t: {2, 5, 11} <= {i for i, _ in t.parts})
    found = shrink([4] * 16, 1, attempt)
    assert [i for i, _ in found.trial.parts] == [2, 5, 11] and found.trial.tokens == 3
    assert len(calls) <= 60


def test_the_sum_of_tokens_can_be_what_counts():
    attempt, _ = counted(lambda t: t.tokens >= 20)
    found = shrink([12, 9, 30, 4], 2, attempt)
    assert found.trial.tokens == 20 and len(found.trial.parts) == 1


def test_another_crash_is_not_this_one():
    """Short documents crash too, elsewhere: the search stays with the first."""

    def attempt(trial):
        if any(n > 9 for _, n in trial.parts):
            return CRASH
        return Crash(type="ValueError", line="other.py:1")

    found = shrink([5, 40], 1, attempt)
    assert [n for _, n in found.trial.parts] == [10] and found.crash.line == "kernel.py:7"


def test_memory_may_run_out_anywhere():
    def attempt(trial):
        return Crash(type="out of memory", line=f"f.py:{trial.tokens}") if trial.tokens > 6 else None

    assert shrink([40], 1, attempt).trial.tokens == 7


def test_no_crash():
    attempt, calls = counted(lambda t: False)
    assert shrink([5, 40], 2, attempt) is None and len(calls) == 1


def test_the_budget_of_trials_holds():
    attempt, calls = counted(lambda t: {2, 5, 11} <= {i for i, _ in t.parts})
    found = shrink([4] * 16, 1, attempt, max_trials=10)
    assert not found.complete and len(calls) == found.trials == 10
    assert {2, 5, 11} <= {i for i, _ in found.trial.parts}  # what is returned does crash
