"""Rows of files, saved `datasets` folders and hub datasets, with columns renamed."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.common_errors import missing_package
from lockstep.config.data import DataConfig
from lockstep.data.rows import PlacedRow, place
from lockstep.errors import ConfigError, DataError, LockstepError, nearest
from lockstep.observe.files import file_errors, path_problem
from lockstep.observe.text import printable

if TYPE_CHECKING:
    import numpy as np
    from pyarrow.parquet import ParquetFile

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
            "lower data.skip"
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
        "DATA'}"
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
                        "iconv -f utf-16 -t utf-8"
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
                f"wrong-row: {path}, row {number}: a row must be a JSON object, got {kind}: {excerpt!r}"
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
        raise missing_package(f"data.source = {source!r}", "datasets", cause=error) from error
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
                f"{column_names(loaded)}"
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
            "to that folder"
        ) from error
    return _rows(loaded, f"data.source = {config.source!r}", config)


def _rows(loaded: Any, what: str, config: DataConfig) -> Iterator[dict[str, Any]]:
    with foreign_errors(f"{what}: a row cannot be read"):
        schema = loaded.features.arrow_schema
        restored = restorer(schema, rendered=rendered_columns(config), source=what, decoded=True)
        yield from map(restored, loaded)


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


def rendered_columns(config: DataConfig) -> frozenset[str]:
    """Return the columns, by their names in the source, whose values a chat template may get."""
    names = {
        config.prompt_column,
        config.messages_column,
        config.completion_column,
        config.chosen_column,
        config.rejected_column,
        "tools",
        "chat_template_kwargs",
    }
    return frozenset(config.columns.get(name, name) for name in names)


# The rows of a batch: a pure function of (number of rows, step, batch size, seed), so there is no state to
# save.


def batch_rows(num_rows: int, *, step: int, n: int, seed: int, shuffle: bool = True) -> list[int]:
    """Return the row numbers of batch `step`; all distinct.

    Shuffled: an epoch is num_rows // n batches of a permutation drawn from (seed, epoch); its last num_rows
    % n rows are left out, so that no batch holds a row twice. Not shuffled: rows in order, cyclically.

    Raises:
        DataError: n exceeds num_rows.

    Example:
        >>> batch_rows(5, step=2, n=2, seed=0, shuffle=False)
        [4, 0]
    """
    if n > num_rows:
        raise DataError(
            f"not-enough: a batch of {n} needs {n} distinct rows, but the set has {num_rows}; take a "
            "smaller batch"
        )
    if not shuffle:
        return [(step * n + i) % num_rows for i in range(n)]
    epoch, batch = divmod(step, num_rows // n)
    order = _permutation(num_rows, seed, epoch)
    return [int(row) for row in order[batch * n : (batch + 1) * n]]


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    import numpy as np  # commands that only read rows load it not

    return np.random.default_rng([seed, epoch]).permutation(num_rows)


# Readers of untrusted JSON lines and Parquet files: whatever they hold, the result is rows or a DataError.


JSON_COLUMNS = b"lockstep.json_columns"
"""Key in the metadata of Parquet files of ours: names of the columns that hold JSON."""
ROW_DEPTH = 200
"""Deepest nesting of lists and objects: functions that walk a row recurse once or twice a level."""


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object.

    Raises:
        DataError: it is no JSON, no object, or nested too deeply.
    """
    value = parse_value(line, where)
    if not isinstance(value, dict):
        raise DataError(
            f"wrong-row: {where}: a row must be a JSON object, got {type(value).__name__}: {line[:80]!r}"
        )
    return value


def parse_value(text: bytes, where: str) -> Any:
    """Parse any JSON value.

    Raises:
        DataError: it is no JSON, or nested too deeply.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # also bytes that are no text
        raise DataError(
            f"not-json: {where}: not valid JSON ({printable(str(error))}): {text[:80]!r}"
        ) from error
    if text.count(b"[") + text.count(b"{") > ROW_DEPTH and _deeper(value, ROW_DEPTH):
        raise DataError(
            f"too-deep: {where}: lists and objects are nested more than {ROW_DEPTH} deep; flatten them"
        )
    return value


def check_surrogates(value: Any, where: str) -> None:
    """Raise DataError for half a surrogate pair in a text of `value`: JSON may hold it, and no text may."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"not-text: {where}: holds half a surrogate pair ({error.object[error.start]!r}), which is not "
            "text; correct or remove the row"
        ) from error


@contextlib.contextmanager
def opened_parquet(path: Path) -> Iterator[ParquetFile]:
    """Open a Parquet file. Errors in the block count as errors of the file.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: the file cannot be read, or is damaged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package(f"{path}: reading Parquet", "pyarrow", cause=error) from error
    errors = foreign_errors(f"{path}: not a readable Parquet file", pyarrow.ArrowException)
    with errors, pyarrow.parquet.ParquetFile(path) as file:
        yield file


@contextlib.contextmanager
def foreign_errors(what: str, *more: type[Exception]) -> Iterator[None]:
    """Turn what a library raises over a damaged file into one DataError that begins with `what`.

    Flipped bits in a Parquet file alone give OSError, UnicodeDecodeError and five kinds of ArrowException.
    """
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, TypeError, AttributeError, LookupError)
    kinds += (ArithmeticError, RuntimeError, MemoryError, *more)
    try:
        yield
    except LockstepError:
        raise
    except kinds as error:
        text = printable(str(error))[:300]
        raise DataError(f"cannot-read: {what} ({type(error).__name__}: {text})") from error


def restorer(
    schema: Any, *, rendered: Collection[str], source: str, decoded: bool = False
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that makes of a row that Arrow kept what it was before: in the columns `rendered`
    without the keys that Arrow adds, as nulls, because another row has them. Arrow does not tell those from
    nulls that were written, so that these go, too; values of its type for JSON keep theirs, and become what
    the JSON says. So do texts of columns that a Parquet file of ours says are JSON.

    Args:
        schema: the Arrow schema of the rows, which is read here once: for each row that would take longer
            than the row.
        decoded: values of Arrow's type for JSON are no text any more.

    Raises:
        DataError: a column that should hold JSON holds no text. The function raises it for a value that
            should be JSON and is none.
    """
    import pyarrow.types as types

    changes: dict[str, _Change] = {}
    for field in schema:
        how = _Kept(drop=field.name in rendered, decoded=decoded, where=f"{source}, {field.name}")
        if (change := _change(field.type, how)) is not None:
            changes[field.name] = change
    for name in json.loads((schema.metadata or {}).get(JSON_COLUMNS, b"[]")):
        if (position := schema.get_field_index(name)) < 0:
            continue  # what selects columns of our files keeps their metadata
        kind = schema.field(position).type
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)):
            raise DataError(
                f"cannot-read: {source} says that its column {name!r} holds JSON, but its values are {kind}, "
                "not text"
            )
        changes[name] = _Kept(drop=False, decoded=False, where=f"{source}, {name}").parsed

    def restored(row: dict[str, Any]) -> dict[str, Any]:
        for name, change in changes.items():
            if (value := row.get(name)) is not None:
                row[name] = change(value)
        return row

    return restored


_Change = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """How a column is restored."""

    drop: bool
    """Nulls of objects."""
    decoded: bool
    where: str

    def parsed(self, value: Any) -> Any:
        return parse_value(value.encode(), self.where) if isinstance(value, str) else value


def _change(kind: Any, how: _Kept) -> _Change | None:
    """What restores a value of this Arrow type that is not null; None: it is as it was."""
    import pyarrow.types as types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return None if how.decoded else how.parsed
    if types.is_struct(kind):
        inside = {field.name: change for field in kind if (change := _change(field.type, how)) is not None}
        return partial(_object, inside, drop=how.drop) if inside or how.drop else None
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        item = _change(kind.value_type, how)
        return None if item is None else partial(_list, item)
    return None


def _object(inside: Mapping[str, _Change], value: Any, *, drop: bool) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: inside[name](item) if name in inside and item is not None else item
        for name, item in value.items()
        if not (drop and item is None)
    }


def _list(change: _Change, value: Any) -> Any:
    return [None if item is None else change(item) for item in value] if isinstance(value, list) else value


def _deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
