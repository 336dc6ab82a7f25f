"""The verdict on an engine, from rows made by hand."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from lockstep_lab.engine_parity.criteria import Limits, Problem, default_threshold, judge
from lockstep_lab.engine_parity.job import Outcome, Row
from lockstep_lab.engine_parity.stats import PhaseReport, report

PROMPTS = ((5, 6, 7), tuple(range(10, 150)))
"""A short one, and one of 140 tokens: longer than a cache block."""
LIMITS = Limits(mean=1e-3, strict=True, temperature=0.7, max_tokens=16, ignore_eos=False)
OUTCOME = Outcome(status="ok", eos_token_ids=(2,), vocab_size=256, update_effect=0.3, push_seconds=(0.1, 0.1))
IDS = {"greedy": 20, "sampled": 40, "other": 80}
"""First id of the completions of each pass; `again` and `alone` repeat `sampled`."""


def completion(kind: str, prompt: int, sample: int, *, phase: str = "before") -> Row:
    """16 tokens of 1 nat each; samples differ from each other, and so do prompts."""
    base = IDS.get(kind, IDS["sampled"]) + 20 * sample + (100 if phase == "after" else 0)
    ids = tuple((base + prompt + i) % 250 + 3 for i in range(16))
    seed = 1000 * (kind == "other") + 10 * prompt + sample
    scored = (-1.0,) * 16
    return Row(
        phase=phase,  # type: ignore[arg-type]
        kind=kind,  # type: ignore[arg-type]
        prompt=prompt,
        sample=sample,
        seed=seed,
        prompt_ids=PROMPTS[prompt],
        token_ids=ids,
        logprobs=scored,
        trainer=scored,
        unscaled=tuple(x - 0.5 for x in scored) if kind == "sampled" else (),
        finish_reason="length",
        stop_reason=None,
        text=None,
        policy_version=2 if phase == "after" else 1,
        told_seed=seed,
    )


def right_rows(phase: str = "before") -> list[Row]:
    both = range(len(PROMPTS))
    return [
        *(completion("greedy", p, 0, phase=phase) for p in both),
        *(completion("sampled", p, i, phase=phase) for p in both for i in range(2)),
        *(completion("again", p, i, phase=phase) for p in both for i in range(2)),
        *(completion("alone", p, 1, phase=phase) for p in both),
        *(completion("other", p, i, phase=phase) for p in both for i in range(2)),
    ]


def change(rows: Sequence[Row], *kinds: str, prompt: int | None = None, **values: Any) -> list[Row]:
    """Rows of these passes with other values; functions get the row."""
    made = []
    for row in rows:
        if (not kinds or row.kind in kinds) and prompt in (None, row.prompt):
            update = {name: value(row) if callable(value) else value for name, value in values.items()}
            row = row.model_copy(update=update)
        made.append(row)
    return made


def phase_of(rows: Sequence[Row], reference: Sequence[Row] | None = None) -> PhaseReport:
    found = report(rows[0].phase, rows, prompts=PROMPTS, passes=(), outcome=OUTCOME, reference=reference)
    assert found is not None
    return found


def verdict(
    rows: Sequence[Row],
    *,
    reference: Sequence[Row] | None = None,
    earlier: Sequence[Row] | None = None,
    limits: Limits = LIMITS,
    outcome: Outcome = OUTCOME,
) -> list[Problem]:
    return judge(
        phase_of(rows, reference),
        rows,
        prompts=PROMPTS,
        limits=limits,
        outcome=outcome,
        earlier=None if earlier is None else (phase_of(earlier), earlier),
    )


def faults(rows: Sequence[Row], **given: Any) -> list[str]:
    return [problem.fault for problem in verdict(rows, **given)]


def test_a_right_engine_has_no_problems():
    before, after = right_rows(), right_rows("after")
    assert verdict(before, reference=right_rows()) == []
    assert verdict(after, reference=right_rows("after"), earlier=before) == []


def test_ids_that_were_not_asked_are_named():
    rows = change(right_rows(), "greedy", prompt_ids=lambda row: (1, *row.prompt_ids))
    (found,) = verdict(rows)
    assert found.fault == "ids"
    assert "2 of 16 completions" in found.text and "[5, 6, 7] from position 0" in found.text
    assert "[1, 5, 6] there" in found.text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"told_seed": 1}, "another seed"),
        ({"logprobs": (-1.0,) * 15}, "not one logprob per token"),
        ({"logprobs": (0.1,) * 16, "trainer": (0.1,) * 16}, "above 0"),
        ({"token_ids": (300,) * 16, "trainer": ()}, "beyond the vocabulary of 256"),
        ({"finish_reason": "abort"}, "'abort'"),
    ],
)
def test_completions_that_cannot_be_right(values: dict[str, Any], text: str):
    found = verdict(change(right_rows(), "greedy", prompt=0, **values))
    assert found[0].fault == "records" and text in found[0].text
    assert "1 of 16 completions (greedy prompt 0)" in found[0].text


def test_length_before_max_tokens():
    short = {"token_ids": (9,) * 5, "logprobs": (-1.0,) * 5, "trainer": (-1.0,) * 5}
    found = verdict(change(right_rows(), "greedy", **short))
    assert found[0].text.startswith('finish reason "length" before max_tokens = 16')


@pytest.mark.parametrize(
    ("ids", "finish", "stop", "text"),
    [
        ((9, 2, 9), "stop", 2, "it went on behind the stop id 2"),
        ((9, 9, 9), "stop", 2, "is not the last of its ids"),
        ((9, 9, 2), "stop", None, "it stopped at id 2 and says it was None"),
        ((9,) * 15 + (2,), "length", None, 'and says "length"'),
    ],
)
def test_stops(ids: tuple[int, ...], finish: str, stop: int | None, text: str):
    floats = (-1.0,) * len(ids)
    values = {"token_ids": ids, "logprobs": floats, "trainer": floats, "finish_reason": finish}
    found = verdict(change(right_rows(), "greedy", stop_reason=stop, **values))
    assert [p.fault for p in found] == ["stops"] and text in found[0].text


def test_a_stop_id_of_the_request_counts_only_there():
    ids, floats = (9, 9, 77), (-1.0,) * 3
    values = {"token_ids": ids, "logprobs": floats, "trainer": floats, "finish_reason": "stop"}
    rows = change(right_rows(), "greedy", stop_reason=77, **values)
    assert faults(rows) == ["stops"]
    assert faults(change(rows, "greedy", stop_id=77)) == []


def test_eos_inside_is_right_where_it_is_ignored():
    rows = change(right_rows(), "greedy", token_ids=(2,) * 16)
    assert faults(rows) == ["stops"]
    assert faults(rows, limits=dataclasses.replace(LIMITS, ignore_eos=True)) == []


def test_policy_versions():
    rows = change(right_rows("after"), policy_version=1)
    (found,) = verdict(rows, earlier=right_rows())
    assert found.fault == "version" and "version 1 instead of 2 on 16 of 16" in found.text
    folder = dataclasses.replace(LIMITS, first_version=0)
    assert faults(rows, earlier=change(right_rows(), policy_version=0), limits=folder) == []


def moved(row: Row) -> tuple[int, ...]:
    return tuple(250 - i for i in row.token_ids)


def test_seeds_that_do_not_decide():
    (found,) = verdict(change(right_rows(), "again", token_ids=moved))
    assert found.fault == "seeds"
    assert "the same seeds twice: 0 of 4 pairs equal" in found.text and "do not decide" in found.text
    (found,) = verdict(change(right_rows(), "alone", token_ids=moved))
    assert "alone and in a batch" in found.text


def test_rounding_may_part_samples_late_unless_it_must_not():
    late = change(right_rows(), "again", token_ids=lambda row: (*row.token_ids[:15], 3))
    assert faults(late) == ["seeds"]
    lenient = dataclasses.replace(LIMITS, strict=False)
    assert faults(late, limits=lenient) == [], "they share 60 of 64 nats, by chance at most 22"
    assert faults(change(right_rows(), "again", token_ids=moved), limits=lenient) == ["seeds"]
    unseeded = dataclasses.replace(LIMITS, seeded=False)
    assert faults(change(right_rows(), "again", token_ids=moved), limits=unseeded) == []


def test_seeds_that_are_not_looked_at():
    first = {(row.prompt, row.sample): row.token_ids for row in right_rows() if row.kind == "sampled"}
    rows = change(right_rows(), "other", token_ids=lambda row: first[row.prompt, row.sample])
    (found,) = verdict(rows)
    assert found.fault == "seeds" and "other seeds give the same samples: 4 of 4" in found.text
    rows = change(right_rows(), "sampled", "again", "alone", token_ids=lambda row: first[row.prompt, 0])
    assert faults(rows) == ["n"]


def test_logprobs_of_another_temperature_are_named():
    rows = change(right_rows(), "sampled", "again", "alone", "other", logprobs=(-1.5,) * 16)
    (found,) = verdict(rows)
    assert found.fault == "logprob kind"
    assert "those of temperature 1, not of logits / 0.7" in found.text


def test_other_gaps_are_gaps():
    rows = change(right_rows(), logprobs=(-1.002,) * 16, unscaled=())
    (found,) = verdict(rows)
    assert found.fault == "gap" and "mean 0.002, max 0.002 nats, more than 0.001" in found.text
    one = change(right_rows(), "greedy", prompt=0, logprobs=(-1.0,) * 15 + (-1.02,))
    assert faults(one) == ["gap"], "0.02 of one token, and 0.01 is let pass"
    one = change(right_rows(), "greedy", prompt=0, logprobs=(-1.0,) * 15 + (-1.009,))
    assert faults(one) == []
    nan = change(right_rows(), "greedy", prompt=0, logprobs=(math.nan,) * 16)
    assert faults(nan) == ["records", "gap"]


def test_greedy_completions_may_part_in_a_tie_only():
    own = change(right_rows(), "greedy", prompt=1, token_ids=moved, trainer=(-1.009,) * 16)
    rows = change(own, "greedy", prompt=1, logprobs=(-1.009,) * 16)
    assert faults(rows, reference=right_rows()) == []
    rows = change(own, "greedy", prompt=1, logprobs=(-1.5,) * 16, trainer=(-1.5,) * 16)
    (found,) = verdict(rows, reference=right_rows())
    assert found.fault == "greedy"
    assert "1 of 2 greedy completions" in found.text and "prompt 1 at token 0: 24 / 226" in found.text
    assert "margin 0.5 nats" in found.text


def test_an_engine_that_missed_the_update():
    before = right_rows()
    rows = change(
        [row.model_copy(update={"phase": "after", "policy_version": 2}) for row in before],
        trainer=(-1.3,) * 16,
        unscaled=(),
    )
    (found,) = verdict(rows, earlier=before)
    assert found.fault == "stale" and "the new weights did not reach it" in found.text


def test_a_stale_prefix_cache_shows_in_long_prompts():
    rows = change(right_rows("after"), prompt=1, trainer=(-1.3,) * 16, unscaled=())
    (found,) = verdict(rows, earlier=right_rows())
    assert found.fault == "stale" and "a stale prefix cache" in found.text
    rows = change(right_rows("after"), trainer=(-1.3,) * 16, unscaled=())
    (found,) = verdict(rows, earlier=right_rows())
    assert found.fault == "stale" and "does not hold all of the new weights" in found.text


def test_an_update_that_changes_nothing_proves_nothing():
    weak = OUTCOME.model_copy(update={"update_effect": 0.0019})
    (found,) = verdict(right_rows("after"), earlier=right_rows(), outcome=weak)
    enough = OUTCOME.model_copy(update={"update_effect": 0.0021})
    assert verdict(right_rows("after"), earlier=right_rows(), outcome=enough) == []
    assert found.fault == "update" and "raise --update-scale" in found.text


def test_thresholds():
    assert default_threshold("float32", 1.0) == 1e-4
    assert default_threshold("bfloat16", 0.5) == 0.1
    assert default_threshold("float16", 2.0) == 0.02
    assert LIMITS.worst == pytest.approx(0.01)


def test_a_report_counts():
    rows = change(right_rows(), "greedy", prompt=0, token_ids=(9,) * 15 + (2,), finish_reason="stop")
    rows = change(rows, "greedy", prompt=0, stop_reason=2)
    found = phase_of(rows, right_rows())
    assert found.finish == {"stop": 1, "length": 15} and found.stops == {"2": 1} and found.special == {"2": 1}
    assert found.greedy is not None and (found.greedy.equal, found.greedy.prompts) == (1, 2)
    assert found.matrix is not None and (found.matrix.samples, found.matrix.longest) == (4, 156)
    assert found.matrix.tokens == 2 * (3 + 16) + 2 * (140 + 16)
    assert found.gap_short is not None and found.gap_long is not None
    assert (found.gap_short.tokens, found.gap_long.tokens) == (8 * 16, 8 * 16)
    assert found.examples[0].asked == ((5, 6, 7), (5, 6, 7))
    assert found.examples[1].read == ((10, 11, 12, 13, 14), (145, 146, 147, 148, 149))
