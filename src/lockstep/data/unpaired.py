"""Sets of single answers that each have a label, for KTO."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat
from lockstep.data.order import batch_rows
from lockstep.data.preferences import pair_contents
from lockstep.data.rows import PlacedRow
from lockstep.data.sft import Content, DocumentMaker, SFTSet, answered, tokenise
from lockstep.data.sources import missing_column, rows_of
from lockstep.errors import DataError
from lockstep.schema.batch import TrainSample, UnpairedSample, prompt_ids


class UnpairedSet(SFTSet):
    """Tokenised answers with labels; samples are UnpairedSamples."""

    def check_prompts(self, *, steps: int, n: int, seed: int) -> None:
        """Check that no batch of n answers is to one prompt alone: KTO's baseline takes each prompt with the
        answer to another one.

        Raises:
            DataError: the step, and what to change.
        """
        prompts = [_prompt_hash(self[i]) for i in range(len(self))]
        most = max(Counter(prompts).values())
        if most == len(self):
            raise DataError(
                f"wrong-pairs: all {most} answers are to one prompt, and KTO's baseline takes each prompt "
                "with the answer to another one; add answers to other prompts",
                prompts=1,
            )
        for step in range(steps if most >= n else 0):
            rows = batch_rows(len(self), step=step, n=n, seed=seed, shuffle=self._shuffle)
            if len({prompts[row] for row in rows}) == 1:
                or_shuffle = "" if self._shuffle else ", or set data.shuffle = true"
                raise DataError(
                    f"wrong-pairs: the {n} answers of step {step + 1} are all to one prompt, and KTO's "
                    "baseline takes each prompt with the answer to another one; raise batch_size above "
                    f"{most}, the most answers that a prompt has{or_shuffle}",
                    step=step,
                    answers=n,
                )

    @property
    def fingerprint(self) -> str:
        """Hash of all answers and their labels, by which a resumed run recognises its data."""
        samples = [self[i] for i in range(len(self))]
        labels = bytes(isinstance(s, UnpairedSample) and s.desirable for s in samples)
        return hashlib.blake2b(super().fingerprint.encode() + labels, digest_size=16).hexdigest()


def load_unpaired(config: DataConfig, *, tokenizer: Any, vocab_size: int | None = None) -> UnpairedSet:
    """Load the answers of a DataConfig.

    Rows have `prompt_column`, `completion_column` and `label_column`, TRL's unpaired form; or they are the
    pairs of `load_preferences`, each of which is a desirable and an undesirable answer. Only what follows the
    prompt is trained on.

    Args:
        vocab_size: entries of the model's embedding; None: not compared with the token ids.

    Raises:
        DataError: missing or malformed data, a label that is neither true nor false, all labels equal, a
            document that is too long or has nothing to train on under `error`, a token id beyond
            `vocab_size`, or nothing left.
        ConfigError: an impossible setting.
    """
    maker = DocumentMaker(config, tokenizer, kind="KTO", vocab_size=vocab_size)
    samples: list[UnpairedSample] = []
    for row in rows_of(config):
        chat = maker.chat.for_row(row, where=row.where)
        for content, desirable, place in _answers(row, config, chat):
            sample = maker.sample(tokenise(content, config, chat, place), place)
            if sample is not None:
                fields = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
                samples.append(UnpairedSample(**fields, desirable=desirable))
    counts = maker.counts
    if not samples:
        raise DataError(f"nothing-left: no answers left of data.source = {config.source!r}: {dict(counts)}")
    counts["desirable"] = sum(sample.desirable for sample in samples)
    if counts["desirable"] in (0, len(samples)):
        kind = "desirable" if counts["desirable"] else "undesirable"
        raise DataError(
            f"wrong-pairs: all {len(samples)} answers of data.source = {config.source!r} are {kind}, and "
            "KTO learns from both kinds; add others, or train on these with `lockstep train sft`",
            kind=kind,
        )
    counts["documents"] = len(samples)
    counts["tokens"] = sum(len(sample) for sample in samples)
    counts["trained_tokens"] = sum(sample.num_trained for sample in samples)
    counts["merged_borders"] = len(maker.chat.merged_borders)
    return UnpairedSet(samples, shuffle=config.shuffle, report=counts, notes=maker.chat.notes)


def _answers(row: PlacedRow, config: DataConfig, chat: ChatFormat) -> Iterator[tuple[Content, bool, str]]:
    """Yield (content, whether it is desirable, where it stands) for each answer of a row."""
    where = row.where
    if config.label_column in row:
        label = row[config.label_column]
        if isinstance(label, str | float) or label not in (True, False):
            raise DataError(
                f"wrong-row: {where}: {config.label_column} = {str(label)[:40]!r} is not a label; it is "
                "true for a desirable answer and false for another one",
                name=config.label_column,
                where=where,
            )
        for column, setting in (
            (config.prompt_column, "data.prompt_column"),
            (config.completion_column, "data.completion_column"),
        ):
            if row.get(column) is None:
                raise missing_column(column, row, setting=setting, source=where)
        prompt, answer = row[config.prompt_column], row[config.completion_column]
        yield answered(prompt, answer, row, config=config, chat=chat, where=where), bool(label), where
        return
    if config.chosen_column not in row and config.rejected_column not in row:
        raise missing_column(config.label_column, row, setting="data.label_column", source=where)
    chosen, rejected = pair_contents(row, config, chat, where)
    yield chosen, True, f"{where}, {config.chosen_column}"
    yield rejected, False, f"{where}, {config.rejected_column}"


def _prompt_hash(sample: TrainSample) -> bytes:
    """Tells prompts apart in 16 bytes: those of a large set, as ids, would take more memory than the set."""
    ids = prompt_ids(sample.token_ids, sample.loss_mask)
    return hashlib.blake2b(repr(ids).encode(), digest_size=16).digest()
