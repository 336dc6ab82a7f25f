"""Rows of files, saved `datasets` folders and hub datasets, with columns renamed."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lockstep.config.data import DataConfig
from lockstep.data.columns import rendered_columns
from lockstep.data.readers import (
    check_surrogates,
    foreign_errors,
    opened_parquet,
    parse_row,
    parse_value,
    restorer,
)
from lockstep.data.rows import PlacedRow, place
from lockstep.errors import ConfigError, DataError, nearest
from lockstep.observe.files import file_errors, path_problem
from lockstep.observe.text import printable

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
_MEANINGS = (
    ("prompt", "question", "problem", "query", "instruction", "input"),
    ("answer", "solution", "response", "completion", "output", "target", "ground_truth"),
    ("messages", "conversation", "conversations"),
)
"""What published data sets call the same column."""
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


def load_rows(config: DataConfig) -> list[PlacedRow]:
    """Load rows [skip, skip + size) of a file, folder or hub dataset, columns renamed by `config.columns`.

    Raises:
        DataError: the source is missing, unreadable, empty, or lacks a column that `columns` names.
        ConfigError: the source is of no known kind, or a package that reads it is missing.
    """
    stop = None if config.size is None else config.skip + config.size
    rows = [
        _rename(row, config, place(row, config.source, index))
        for index, row in enumerate(islice(_read(config), config.skip, stop), start=config.skip)
    ]
    if not rows:
        raise DataError(
            f"nothing-left: data.source = {config.source!r} has no rows after data.skip = {config.skip}; "
            "lower data.skip",
            setting="data.skip",
        )
    return rows


def rows_of(config: DataConfig) -> list[PlacedRow]:
    """Load the rows to make documents or prompts of, see `load_rows`.

    Raises:
        DataError, ConfigError: as `load_rows`; and no row has a column that is named by a `*_column` setting.
    """
    rows = load_rows(config)
    for setting in named_columns(config):
        column = getattr(config, setting)
        if not any(column in row for row in rows):
            raise missing_column(column, rows[0], setting=f"data.{setting}", source=config.source)
    return rows


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
    if path.is_dir():
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
            "saved by datasets, a hub name such as 'openai/gsm8k', 'reasoning_gym:TASK', or 'ids'"
        )


def missing_column(column: str, row: Mapping[str, Any], *, setting: str, source: str) -> DataError:
    """Return the error for a missing column: the nearest names first, then all of them."""
    near = nearest(column, row) or _of_the_same_meaning(column, row)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return DataError(
        f"missing-column: {source!r} has no column {column!r} ({setting}); {hint}Columns: "
        f"{column_names(row)}. Set {setting}, or rename with data.columns = {{{column} = 'NAME IN THE "
        "DATA'}",
        setting=setting,
        name=column,
        where=source,
    )


def _of_the_same_meaning(column: str, row: Mapping[str, Any]) -> list[str]:
    return [name for names in _MEANINGS if column in names for name in row if name in names][:3]


def column_names(row: Mapping[str, Any]) -> str:
    """Return the names of a row's columns for a message: on one line, 40 at most."""
    names = [printable(name[:80]) for name in islice(row, 40)]
    return ", ".join([*names, *(["..."] if len(row) > len(names) else [])])


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


def _read(config: DataConfig) -> Iterator[dict[str, Any]]:
    check_source(config)
    path = Path(config.source).expanduser()
    if path.is_dir():
        return _read_folder(path, config)
    if path.suffix == ".parquet":
        return _read_parquet(path, config)
    if path.suffix in FILE_SUFFIXES:
        return {".jsonl": _read_jsonl, ".json": _read_json}[path.suffix](path)
    return _read_hub(config)


def _no_such_file(path: Path) -> DataError:
    folder = path.parent
    beside = [p.name for p in folder.iterdir() if p.suffix in FILE_SUFFIXES] if folder.is_dir() else []
    near = nearest(path.name, beside)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else f" (looked in {folder.resolve()})"
    return DataError(f"no-such-file: data.source = {str(path)!r}: no such file{hint}")


def _read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with file_errors(path, DataError), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(
                        f"not-text: {path}: is UTF-16, which cannot be read by lines; convert it to UTF-8: "
                        "iconv -f utf-16 -t utf-8",
                        where=where,
                    )
                row = parse_row(line, where)
                # Half a pair stands in a line as an escape or, as json.loads takes it, as bytes from ED.
                if b"\\u" in line or b"\xed" in line:
                    check_surrogates(row, where)
                yield PlacedRow(row, where=where)


def _read_json(path: Path) -> Iterator[dict[str, Any]]:
    with file_errors(path, DataError):
        text = path.read_bytes()
    value = parse_value(text, f"{path} (one object per line belongs in .jsonl)")
    if not isinstance(value, list):
        raise DataError(
            f"wrong-type: {path}: expected a list of objects, got {type(value).__name__}; put the rows into "
            "[ ], or write one object per line into a .jsonl file"
        )
    check_surrogates(value, str(path))
    for number, row in enumerate(value, start=1):
        if not isinstance(row, dict):
            kind, excerpt = type(row).__name__, str(row)[:80]
            raise DataError(
                f"wrong-row: {path}, row {number}: a row must be a JSON object, got {kind}: {excerpt!r}",
                where=f"{path}, row {number}",
            )
        yield row


def _read_parquet(path: Path, config: DataConfig) -> Iterator[dict[str, Any]]:
    with opened_parquet(path) as file:
        restored = restorer(file.schema_arrow, rendered=rendered_columns(config), source=str(path))
        for batch in file.iter_batches():
            yield from map(restored, batch.to_pylist())


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"missing-package: data.source = {source!r} needs datasets; pip install datasets"
        ) from error
    return datasets


def _read_folder(path: Path, config: DataConfig) -> Iterator[dict[str, Any]]:
    datasets = _datasets(config.source)
    try:
        with foreign_errors(f"data.source = {str(path)!r}: not a readable folder of datasets"):
            loaded = datasets.load_from_disk(str(path))
    except DataError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise DataError(
            f"wrong-kind-of-file: data.source = {str(path)!r} is a folder, but not one written by datasets' "
            f"save_to_disk ({error.__cause__}); name a .jsonl, .json or .parquet file in it instead"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if config.split not in loaded:
            raise DataError(
                f"unknown-name: {path} has no split {config.split!r}; set data.split to one of "
                f"{column_names(loaded)}",
                setting="data.split",
            )
        loaded = loaded[config.split]
    return _rows(loaded, f"data.source = {str(path)!r}", config)


def _read_hub(config: DataConfig) -> Iterator[dict[str, Any]]:
    datasets = _datasets(config.source)
    try:
        loaded = datasets.load_dataset(config.source, config.subset, split=config.split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"refused: cannot load data.source = {config.source!r} (subset {config.subset!r}, split "
            f"{config.split!r}) from the Hugging Face hub: {type(error).__name__}: {str(error)[:300]}. "
            "Check the name, data.subset and data.split and the network (HF_HUB_OFFLINE, HF_ENDPOINT, "
            "HF_TOKEN), or download it elsewhere, write it with datasets' save_to_disk, and set data.source "
            "to that folder",
            setting="data.source",
        ) from error
    return _rows(loaded, f"data.source = {config.source!r}", config)


def _rows(loaded: Any, what: str, config: DataConfig) -> Iterator[dict[str, Any]]:
    with foreign_errors(f"{what}: a row cannot be read"):
        schema = loaded.features.arrow_schema
        restored = restorer(schema, rendered=rendered_columns(config), source=what, decoded=True)
        yield from map(restored, loaded)
