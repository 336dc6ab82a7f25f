"""Rows of files, saved `datasets` folders and hub datasets, with columns renamed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lockstep.config.base import is_module_path
from lockstep.config.data import DataConfig
from lockstep.data.lazy import EndOfStream, LazyItems, Make
from lockstep.data.rows import FIRST_ROWS, PlacedRow, place
from lockstep.data.streams import StreamItems, open_stream
from lockstep.data.tables import column_names, open_table
from lockstep.errors import ConfigError, DataError, nearest
from lockstep.observe.files import path_problem

T = TypeVar("T")

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
_MEANINGS = (
    ("prompt", "question", "problem", "query", "instruction", "input"),
    ("answer", "solution", "response", "completion", "output", "target", "ground_truth"),
    ("messages", "conversation", "conversations"),
)
"""Names of the same column in published data sets."""
_CONVERT = (
    ", such as with datasets: load_dataset({0!r}, data_files=FILE, split='train').to_json('data.jsonl')"
)
_OTHER_FILES = {
    ".csv": _CONVERT.format("csv"),
    ".tsv": _CONVERT.format("csv"),
    ".txt": _CONVERT.format("text"),
    ".arrow": _CONVERT.format("arrow"),
    **dict.fromkeys((".gz", ".zst", ".zip", ".xz", ".bz2"), "; unpack it first"),
}
"""Suffixes of data that no reader takes, which a hub name does not have, and how to convert it."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source:
    """Rows [skip, skip + size) of a file, folder or hub data set, by number from 0, columns renamed by
    `config.columns`.

    Raises:
        DataError: the source is missing, unreadable or empty.
        ConfigError: it is of no known kind, or a package that reads it is missing.
    """

    def __init__(self, config: DataConfig) -> None:
        check_source(config)
        self.config = config
        self.table = open_stream(config) if config.streaming else open_table(config)
        left = max(len(self.table) - config.skip, 0)
        self._length = left if config.size is None else min(left, config.size)
        if not left or (config.streaming and not self.head(1)):
            problem = "is empty; give it rows, one JSON object per line in a .jsonl file"
            if config.skip:
                problem = f"has no rows after data.skip = {config.skip}; lower data.skip"
            raise DataError(f"nothing-left: data.source = {config.source!r} {problem}")

    def __len__(self) -> int:
        return self._length

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the content and of the selection of its rows."""
        return f"{self.table.fingerprint}/{self.config.skip}/{len(self)}"

    def read(self, numbers: Sequence[int]) -> list[PlacedRow | DataError]:
        """Return the rows with these numbers, or for one at fault the error.

        Raises:
            DataError: the source has changed, or cannot be read any more.
            EndOfStream: one is beyond the end of a source that is streamed.
        """
        if len(numbers) and max(numbers) >= len(self):
            raise EndOfStream(len(self))
        try:
            return self._read(numbers)
        except EndOfStream as end:
            self._length = min(self._length, max(end.rows - self.config.skip, 0))
            raise EndOfStream(self._length) from end

    def _read(self, numbers: Sequence[int]) -> list[PlacedRow | DataError]:
        places = [self.config.skip + number for number in numbers]
        return [
            row if isinstance(row, DataError) else self._renamed(row, place(row, self.config.source, at))
            for at, row in zip(places, self.table.read(places), strict=True)
        ]

    def _renamed(self, row: Mapping[str, Any], where: str) -> PlacedRow | DataError:
        try:
            return _rename(row, self.config, where)
        except DataError as error:
            return error

    def head(self, count: int) -> list[PlacedRow | DataError]:
        """Return the first `count` rows, or fewer where there are fewer, and errors for those at fault."""
        try:
            return self.read(range(min(count, len(self))))
        except EndOfStream as end:
            return self.read(range(min(count, end.rows)))

    def first_rows(self) -> list[PlacedRow]:
        """Return the first rows, of which settings are looked up, without those at fault."""
        return [row for row in self.head(FIRST_ROWS) if not isinstance(row, DataError)]

    def items(self, make: Make[T], *, selective: bool, of_row: int = 1) -> LazyItems[T]:
        """Return the items that `make` makes of the rows.

        Args:
            selective: whether a setting leaves items out.
            of_row: items that a row may have.
        """
        config, selective = self.config, selective or of_row > 1  # a row may have fewer
        if config.streaming:
            return StreamItems(make, self._row, config=config, selective=selective, of_row=of_row)
        items = LazyItems(len(self) * of_row, make, config=config, selective=selective)
        items.of_row = of_row
        return items

    def _row(self, number: int) -> PlacedRow | DataError:
        return self.read([number])[0]

    def check_columns(self) -> None:
        """Raise DataError unless one of the first rows has each column that a `*_column` setting names."""
        rows = self.first_rows()
        for setting in named_columns(self.config):
            column = getattr(self.config, setting)
            if rows and not any(column in row for row in rows):
                raise missing_column(column, rows[0], setting=f"data.{setting}", source=self.config.source)


def load_rows(config: DataConfig) -> list[PlacedRow]:
    """Load all rows of a `Source`.

    Raises:
        DataError: the source is missing, unreadable, empty, or lacks a column that `columns` names.
        ConfigError: the source is of no known kind, or a package that reads it is missing.
    """
    source = Source(config)
    return [good_row(row) for row in source.head(len(source))]


def count_rows(config: DataConfig, at_most: int) -> int:
    """Return the number of rows of a source, of which no more than `at_most` are looked for. Raises as
    `Source`."""
    source = Source(config)
    return len(source.head(at_most)) if config.streaming else min(len(source), at_most)


def good_row(row: PlacedRow | DataError) -> PlacedRow:
    """Return a row of `Source.read`. Raises the error that it is instead."""
    if isinstance(row, DataError):
        raise row
    return row


def named_columns(config: DataConfig) -> list[str]:
    """Return the `*_column` settings that have another value than their own."""
    fields = type(config).model_fields
    return [
        name for name in fields if name.endswith("_column") and getattr(config, name) != fields[name].default
    ]


def check_source(config: DataConfig) -> None:
    """Check that the source exists, without reading it.

    Raises:
        DataError: a file that does not exist.
        ConfigError: a source of no known kind.
    """
    if config.generated:
        return
    if problem := path_problem(config.source):
        raise ConfigError(
            f"bad-file-name: data.source = {config.source[:80]!r} cannot name anything: {problem}"
        )
    path = Path(config.source).expanduser()
    if path.is_dir() or is_module_path(config.source):  # a function is imported when it is called
        return
    if path.suffix in FILE_SUFFIXES:
        if not path.is_file():
            raise _no_such_file(path)
    elif path.is_file() or path.suffix in _OTHER_FILES:
        raise ConfigError(
            f"wrong-kind-of-file: data.source = {config.source!r}: files of this kind are not read; convert "
            f"it to .jsonl, .json or .parquet{_OTHER_FILES.get(path.suffix, '')}"
        )
    elif ":" in config.source or not _HUB_NAME.fullmatch(config.source):
        raise ConfigError(
            f"unknown-name: data.source = {config.source!r} is not a .jsonl/.json/.parquet file, a folder "
            "saved by datasets, a hub name such as 'openai/gsm8k', a function 'module:function', "
            "'reasoning_gym:TASK', or 'ids'"
        )


def missing_column(column: str, row: Mapping[str, Any], *, setting: str, source: str) -> DataError:
    """Return the error for a missing column: the nearest names first, then all of them."""
    near = nearest(column, row) or _of_the_same_meaning(column, row)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return DataError(
        f"missing-column: {source!r} has no column {column!r} ({setting}){hint} Columns: "
        f"{column_names(row)}. Set {setting}, or rename with data.columns = {{{column} = 'NAME IN THE "
        "DATA'}"
    )


def _of_the_same_meaning(column: str, row: Mapping[str, Any]) -> list[str]:
    return [name for names in _MEANINGS if column in names for name in row if name in names][:3]


def _rename(row: Mapping[str, Any], config: DataConfig, where: str) -> PlacedRow:
    for new, old in config.columns.items():
        if old not in row:
            raise missing_column(old, row, setting=f"data.columns.{new}", source=where)
    renamed = set(config.columns.values())
    kept = {name: value for name, value in row.items() if name not in renamed}
    kept.update({new: row[old] for new, old in config.columns.items()})
    if config.answer_column != "answer":
        if config.answer_column not in kept:
            raise missing_column(config.answer_column, kept, setting="data.answer_column", source=where)
        kept["answer"] = kept[config.answer_column]
    elif "answer" not in kept:
        verl = kept.get("reward_model")
        if isinstance(verl, Mapping) and "ground_truth" in verl:
            kept["answer"] = verl["ground_truth"]
    return PlacedRow(kept, where=where)


def _no_such_file(path: Path) -> DataError:
    folder = path.parent
    beside = [p.name for p in folder.iterdir() if p.suffix in FILE_SUFFIXES] if folder.is_dir() else []
    near = nearest(path.name, beside)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f" (looked in {folder.resolve()})"
    return DataError(f"no-such-file: data.source = {str(path)!r}: no such file{hint}")


# Columns and keys that the formats of TRL, OpenAI and verl give a meaning.


_TOKENS = "texts are tokenised here"
_TEXT = "only text is read"
_LOGPS = "the reference computes them here"
UNREAD = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT),
    **dict.fromkeys(
        ("input_ids", "attention_mask", "position_ids", "seq_lengths", "labels", "loss_mask"), _TOKENS
    ),
    **dict.fromkeys(("assistant_masks", "completion_mask", "prompt_ids", "completion_ids"), _TOKENS),
    **dict.fromkeys(("chosen_ids", "rejected_ids", "raw_prompt_ids"), _TOKENS),
    **dict.fromkeys(("ref_chosen_logps", "ref_rejected_logps", "reference_chosen_logps"), _LOGPS),
    "reference_rejected_logps": _LOGPS,
    "completions": "a reward for each step of an answer is not supported",
    "functions": "write it as tools = [{type = 'function', function = ...}]",
    "function_call": "write it as tool_calls of a message",
    "parallel_tool_calls": "samples are not limited to one call",
    "response_format": "samples are free text",
    "data_source": "the rewards of the config score every row; they see the column in `row`",
    "agent_name": "a prompt has one answer; no agent loop is run",
    "tools_kwargs": "no tools are run while sampling",
    "interaction_kwargs": "no interaction is run while sampling",
}
"""Column to the reason for which it is ignored. Not in it: what has no effect in its own format."""


def configured_columns(config: DataConfig) -> frozenset[str]:
    """Return the columns that a setting names: they mean what the setting says."""
    return frozenset(
        {
            config.prompt_column,
            config.messages_column,
            config.completion_column,
            config.chosen_column,
            config.rejected_column,
            config.margin_column,
            config.label_column,
            config.text_column,
            config.answer_column,
            *config.columns,
        }
    )
