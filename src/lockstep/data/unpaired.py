"""Sets of single answers that each have a label, for KTO."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat
from lockstep.data.preferences import as_sft
from lockstep.data.sft import SFTSet, document_format, document_sample, tokenise_row
from lockstep.data.sources import load_rows, missing_column
from lockstep.data.spans import Document
from lockstep.errors import DataError
from lockstep.schema.batch import UnpairedSample


class UnpairedSet(SFTSet):
    """Tokenised answers with labels; samples are UnpairedSamples."""

    @property
    def fingerprint(self) -> str:
        """Hash of all answers and their labels, by which a resumed run recognises its data."""
        samples = [self[i] for i in range(len(self))]
        labels = bytes(isinstance(s, UnpairedSample) and s.desirable for s in samples)
        return hashlib.blake2b(super().fingerprint.encode() + labels, digest_size=16).hexdigest()


def load_unpaired(config: DataConfig, *, tokenizer: Any) -> UnpairedSet:
    """Load the answers of a DataConfig.

    Rows have `prompt_column`, `completion_column` and `label_column`, TRL's unpaired form; or they are the
    pairs of `load_preferences`, each of which is a desirable and an undesirable answer. Only what follows the
    prompt is trained on.

    Raises:
        DataError: missing or malformed data, a label that is neither true nor false, all labels equal, a
            document that is too long or has nothing to train on under `error`, or nothing left.
        ConfigError: an impossible setting.
    """
    chat = document_format(config, tokenizer, kind="KTO")
    counts: Counter[str] = Counter(dropped_overlong=0, dropped_untrained=0, truncated=0)
    samples: list[UnpairedSample] = []
    for index, row in enumerate(load_rows(config), start=config.skip):
        where = f"{config.source}, row {index}"
        for answer, desirable, place in _answers(row, config, where):
            document = _after_prompt(tokenise_row(answer, config, chat, place), answer, config, chat)
            sample = document_sample(document, config, counts, place)
            if sample is not None:
                fields = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample)}
                samples.append(UnpairedSample(**fields, desirable=desirable))
    if not samples:
        raise DataError(
            f"no answers left of data.source = {config.source!r}: {dict(counts)}", code="nothing-left"
        )
    counts["desirable"] = sum(sample.desirable for sample in samples)
    if counts["desirable"] in (0, len(samples)):
        kind = "desirable" if counts["desirable"] else "undesirable"
        raise DataError(
            f"all {len(samples)} answers of data.source = {config.source!r} are {kind}, and KTO learns from "
            f"both kinds; add others, or train on these with `lockstep train sft`",
            code="wrong-pairs",
            kind=kind,
        )
    counts["documents"] = len(samples)
    counts["tokens"] = sum(len(sample) for sample in samples)
    counts["trained_tokens"] = sum(sample.num_trained for sample in samples)
    return UnpairedSet(samples, shuffle=config.shuffle, report=counts)


def _answers(
    row: Mapping[str, Any], config: DataConfig, where: str
) -> Iterator[tuple[dict[str, Any], bool, str]]:
    """(row of an SFT set, whether it is desirable, where it stands) for each answer of a row."""
    if config.label_column in row:
        label = row[config.label_column]
        if isinstance(label, str | float) or label not in (True, False):
            raise DataError(
                f"{where}: {config.label_column} = {str(label)[:40]!r} is not a label; it is true for a "
                "desirable answer and false for another one",
                code="wrong-row",
                name=config.label_column,
                where=where,
            )
        for column, setting in (
            (config.prompt_column, "data.prompt_column"),
            (config.completion_column, "data.completion_column"),
        ):
            if row.get(column) is None:
                raise missing_column(column, row, setting=setting, source=where)
        yield {k: v for k, v in row.items() if k != config.messages_column}, bool(label), where
        return
    if config.chosen_column not in row and config.rejected_column not in row:
        raise missing_column(config.label_column, row, setting="data.label_column", source=where)
    for column in (config.chosen_column, config.rejected_column):
        place = f"{where}, {column}"
        yield as_sft(row, column, config, where), column == config.chosen_column, place


def _after_prompt(
    document: Document, row: Mapping[str, Any], config: DataConfig, chat: ChatFormat
) -> Document:
    """The document, trained on nothing of its prompt: earlier answers in it have no label."""
    prompt = row.get(config.prompt_column)
    if prompt is None:  # a whole conversation: the last answer has the label
        prompt = row[config.messages_column][:-1]
    if isinstance(prompt, str) or config.train_on == "all":
        return document
    earlier = sum(message.get("role") == "assistant" for message in prompt if isinstance(message, Mapping))
    trained = list(document.trained)
    starts = [i for i, on in enumerate(trained) if on and not (i and trained[i - 1])]
    if earlier and len(starts) > earlier:
        trained[: starts[earlier]] = [False] * starts[earlier]
    return dataclasses.replace(document, trained=trained)
