"""Every error Lockstep raises on purpose, in one tree.

    LockstepError
    ├── ConfigError(ValueError)      a setting is wrong or impossible; raised before any model is loaded
    ├── DataError(ValueError)        a dataset, row or prompt is not what it must be
    ├── RewardError(RuntimeError)    a reward raised or returned something that is not a finite number
    ├── ModelError(ValueError)       a model cannot be loaded, or its architecture is not supported
    ├── EngineError(RuntimeError)    an inference engine failed or returned something inconsistent
    ├── TrainError(RuntimeError)     a train step cannot go on (non-finite loss, out of memory, ...)
    ├── CheckpointError(ValueError)  a checkpoint is missing, damaged or belongs to something else
    ├── RecordingError(ValueError)   a recording is missing, damaged or does not fit what it is replayed on
    └── ParityError(AssertionError)  two things that must agree do not

A message names the value, the reason and what to set instead. The kind of mistake, a code of CODES, is its
first word:

    raise ConfigError(f"out-of-range: train.lr = {lr} is not above 0; set 1e-6")

`str(error)` is the message without the code. A program reads `error.code` and `error.fields`, not the words.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

_SETTING = re.compile(
    r"--[a-z][\w-]*(?:\.[\w-]+)*(?=[ :]|$)|[a-z_]\w*(?:\[\d+\])?(?:\.\w+(?:\[\d+\])?)+(?= = )"
)
"""What a message begins with that is about a flag (`--lr ...`) or a setting (`train.lr = ...`). A dotted name
alone is not enough: `rows.jsonl is empty` is about a file."""


class LockstepError(Exception):
    """Root of the errors that Lockstep raises on purpose.

    Args:
        message: "CODE: text for the user". The setting or flag that the text begins with becomes the field
            `setting`.
        code: the kind of mistake, one of CODES. The whole message is then the text, whatever it begins with.
        fields: what a program needs beside the code, as JSON values; of a path and of anything else that JSON
            does not have its text is kept. What only people read stands in the message.

    Raises:
        TypeError: `code` is not given, and the message does not begin with a code of CODES.

    Example:
        >>> error = ConfigError("out-of-range: train.lr = -1 is not above 0; set 1e-6")
        >>> str(error), error.data
        ('train.lr = -1 is not above 0; set 1e-6', {'code': 'out-of-range', 'setting': 'train.lr'})
    """

    parts: tuple[LockstepError, ...] = ()
    """The errors that `together` made one of."""

    def __init__(self, message: str, *, code: str | None = None, **fields: Any) -> None:
        if code is None:
            code, colon, text = message.partition(": ")
            if not colon or code not in CODES:
                raise TypeError(
                    f"an error needs a code of CODES as the first word of its message: {redacted(message)}"
                )
            message = text
            if begins := _SETTING.match(message):
                fields = {"setting": begins[0], **fields}
        super().__init__(redacted(message))
        self.code = code
        self.underway = False
        """Whether it ended work that had begun: steps were done, or results written."""
        self.fields = {name: _plain(value) for name, value in fields.items()}

    @property
    def data(self) -> dict[str, Any]:
        """Code and fields, as they are written where an error is written as JSON."""
        return {"code": self.code, **self.fields}

    def with_message(
        self, message: str, *, kind: type[LockstepError] | None = None, **fields: Any
    ) -> LockstepError:
        """Return this error with another text: `raise error.with_message(f"row 3: {error}") from error`.

        Args:
            message: the whole text; a code in front of it would be part of the text.
            kind: class of the new error, if not that of this one.
            fields: added to this error's, or in place of them.
        """
        if kind is None or kind is type(self):
            error = copy.copy(self)  # with what a class of its own keeps beside code and fields
            error.args = (redacted(message),)
            error.fields = self.fields | {name: _plain(value) for name, value in fields.items()}
            error.__dict__.pop("__notes__", None)  # they stand below the cause
        else:
            error = kind(message, **{**self.data, **fields})
            error.underway = self.underway
        return error

    @property
    def status(self) -> int:
        """The exit status of a command that it ends: 2 where something that was given is wrong (a setting,
        data, a model, a checkpoint, a recording) and nothing had begun, else 1."""
        given = isinstance(self, ConfigError | DataError | ModelError | CheckpointError | RecordingError)
        # A run that has ended cannot be stopped: nothing is wrong with its name.
        return 2 if given and not self.underway and self.code != "wrong-state" else 1

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled with its positional arguments only, and made again from them.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[LockstepError], args: tuple[Any, ...], state: dict[str, Any]) -> LockstepError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def _plain(value: Any) -> Any:
    """The value as JSON has it."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    # Half a surrogate pair, as in the name of a file, could be sent to no other rank.
    return redacted(str(value).encode("utf-8", errors="backslashreplace").decode("utf-8"))


def from_another_process(kind: str, message: str, data: Mapping[str, Any]) -> LockstepError | None:
    """Return the error that another process of the run raised, or None if it was not one of this module.

    Args:
        kind: name of its class; a class of somebody else may have the same name.
        message: the whole text; a code in front of it would be part of the text.
        data: its `LockstepError.data`, empty for an error that is not a LockstepError.
    """
    known = globals().get(kind)
    if "code" in data and isinstance(known, type) and issubclass(known, LockstepError):
        return known(message, **data)
    return None


@contextlib.contextmanager
def underway(began: Callable[[], bool]) -> Iterator[None]:
    """Mark an error of the body as one of work that had begun, if it had: see `LockstepError.status`."""
    try:
        yield
    except LockstepError as error:
        error.underway = began()
        raise


class ConfigError(LockstepError, ValueError):
    """A setting is wrong, or a combination of settings is impossible."""


class DataError(LockstepError, ValueError):
    """A dataset, a row or a prompt is invalid."""


class RewardError(LockstepError, RuntimeError):
    """A reward raised, timed out, or returned something that is not a finite number."""


class ModelError(LockstepError, ValueError):
    """A model cannot be loaded, or its architecture is not supported."""


class EngineError(LockstepError, RuntimeError):
    """An inference engine failed or returned something inconsistent."""


class TrainError(LockstepError, RuntimeError):
    """A train step cannot continue."""


class CheckpointError(LockstepError, ValueError):
    """A checkpoint is missing, damaged, or belongs to another run or model."""


class RecordingError(LockstepError, ValueError):
    """A recording is missing, damaged, hostile, or does not match the model."""


class ParityError(LockstepError, AssertionError):
    """Results that must agree differ."""


CODES = {
    "unknown-name": ("A name is unknown. The message lists the known names and suggests the nearest."),
    "unknown-setting": "A setting, flag or argument does not exist. The message suggests the nearest names.",
    "missing-setting": "A required setting or flag is missing. Set it.",
    "wrong-type": "A value has the wrong type, such as text instead of a number.",
    "out-of-range": "A number is outside the allowed range. The message has the bounds.",
    "wrong-format": "A text has the wrong form. The message shows the expected form.",
    "no-effect": "A setting would have no effect with the other settings. Remove it, or set what it needs.",
    "secret-in-config": (
        "A setting contains a secret. Name an environment variable or a file of mode 0600 instead."
    ),
    "contradiction": (
        "Two settings or flags exclude each other, or their values conflict. Change one of them."
    ),
    "unsupported-combination": ("Settings cannot be used together. The message says which one to change."),
    "not-divisible": "A number is not a multiple of another one, as it must be.",
    "duplicate": "Something that must be unique is given or stored twice.",
    "nothing-to-do": "With these settings nothing would be trained, recorded, measured or compared.",
    "not-enough": "There are fewer rows, prompts or nodes than requested. Request less, or add some.",
    "endless": "An endless source is used where a finite one is needed. Set its size.",
    "ambiguous": "Several things match. Name one of them.",
    "missing-package": (
        "A Python package or program is not installed. The message has the command that installs it."
    ),
    "missing-device": "This machine lacks the device, or this kind of device cannot do the work.",
    "wrong-environment": ("An environment variable, or the environment of this process, is wrong."),
    "unsupported-version": "The version of a package, a server or a file is not supported.",
    "wrong-part": (
        "A custom part (backend, engine, reward, ...) cannot be loaded, or lacks a required member."
    ),
    "missing-argument": "A part was constructed without a required object.",
    "no-such-file": "A file or folder does not exist.",
    "not-a-file": "The path is not a regular file or folder.",
    "bad-file-name": "No file can have this name.",
    "already-exists": "The output already exists. Choose another, or allow its use.",
    "cannot-read": "A file or folder cannot be read. The message has the cause.",
    "cannot-write": "A file or folder cannot be created, written or removed. The message has the cause.",
    "no-space": "The disk is full, or has too little free space.",
    "not-text": "Bytes are not valid UTF-8, or text cannot be encoded.",
    "leads-out-of-folder": "A link or a name points outside the folder in which it must stay.",
    "too-large": "Too many bytes, values or entries.",
    "too-deep": "Lists, tables or archives are nested too deeply.",
    "not-json": "Not valid JSON.",
    "not-toml": "Not valid TOML.",
    "damaged-file": "A file is damaged. Fetch or copy it again.",
    "wrong-field": "A field of a file has an invalid value. The file was edited, or is damaged.",
    "missing-field": "A file lacks a required field.",
    "version-differs": ("The versions of a file and of this Lockstep, or of two nodes, differ."),
    "file-changed": "A file was written while it was being read. Restore it, or start again.",
    "hash-differs": "The content of a file does not match its checksum. It is damaged or was edited.",
    "mixed-files": "Files of several saves or recordings are mixed. Restore all files of the same one.",
    "incomplete": ("Files or lines are missing. Restore them, or run the command that writes them again."),
    "out-of-order": "Lines of a file are out of order or repeated.",
    "wrong-kind-of-file": (
        "The file or folder is readable, but not of the expected kind: not a run, not a recording, ..."
    ),
    "locked": "Another process is using it. Wait for that process, or end it.",
    "forbidden-content": "A file requests something that would execute code. Nothing was executed.",
    "wrong-row": "A row of a dataset is invalid. Correct it.",
    "missing-column": ("A column is missing in all rows, or in one of them. Rename it, or set another name."),
    "empty": "A prompt, a document or a text is empty.",
    "too-long": "A text, document or path is too long.",
    "outside-vocabulary": "A token id is outside the model's vocabulary.",
    "no-tokenizer": "Text is needed, but the model has no (matching) tokenizer.",
    "no-chat-template": "A conversation needs a chat template, but the tokenizer has none.",
    "unsupported-chat-template": "The chat template cannot be used for this purpose.",
    "nothing-left": "No rows, prompts, inputs or losses remain after the selection.",
    "wrong-pairs": "Answers do not form the pairs, or the two kinds, that the loss compares.",
    "unsupported-model": "The model's architecture, config or code is not supported.",
    "wrong-shape": "A tensor, a list or a result has the wrong shape or number of entries.",
    "wrong-weights": "Names of weights are unknown, missing or repeated.",
    "other-model": "Files, weights, a server or a tokenizer belong to another model.",
    "batch-dependent": "The results of a model depend on the rest of the batch.",
    "not-batch-invariant": (
        "Something has no batch-invariant form. Set train.batch_invariant = false, or change it."
    ),
    "kernels-differ": "Trainer and engine use different kernels.",
    "values-differ": "Values that must be equal differ.",
    "wrong-state": "The call is not possible in this state: closed, asleep, busy, updating, done.",
    "wrong-result": "An engine or a custom part returned a wrong result.",
    "bad-reply": "A reply is malformed, or its status is an error.",
    "refused": ("A server, library, program or template rejected its input. The message has the reason."),
    "unreachable": "Nothing answers at the address, or the connection broke.",
    "deadline": "Something took too long. The message names the setting of the deadline.",
    "process-died": "A process died, or could not be started. The message names its log.",
    "port-in-use": "Another process is using the port.",
    "server-settings": (
        "A server was started with settings that this run cannot use. The message has the flag."
    ),
    "transfer-failed": "Weights could not be sent from the trainer to the engine.",
    "unsupported-sampling": "The engine cannot honour a sampling parameter.",
    "unrequested-abort": "The engine aborted samples without being asked to; somebody else is using it.",
    "not-authenticated": "A token or a secret is missing or wrong, or a cluster does not require one.",
    "not-ours": "Another user of the machine owns or can change a file or folder that must be private.",
    "not-finite": "A loss, a gradient, a score or a logprob is NaN or infinite.",
    "out-of-memory": "A device or the machine has too little memory. The message says what to lower.",
    "no-gradients": "There are no gradients for the optimizer step.",
    "missing-values": "A batch lacks what the loss needs, such as ref_logprobs.",
    "wrong-batch": "Samples or a batch are of the wrong kind for the loss or the packer.",
    "too-many-recompiles": "Code was recompiled more often than train.max_recompiles allows.",
    "ranks-differ": "Ranks have different settings, data or micro-batches.",
    "out-of-step": "A rank is waiting for another rank that is doing something else, or is gone.",
    "peer-failed": "This rank ends because another rank failed or is gone.",
    "not-resumable": "A run cannot be resumed with these settings.",
    "equal-rewards": "Too few groups have rewards that differ.",
    "reward-failed": "A reward raised, timed out, or did not return a finite number.",
    "cell-failed": "One of two compared configurations raised an error.",
}
"""Error code -> what it means, and what to do about it."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name: the name, the nearest known names, then all of them.

    Example:
        >>> unknown_name("train backend", "fsdp", ["local", "fsdp2"])
        "unknown train backend 'fsdp'; did you mean 'fsdp2'? Known: fsdp2, local"
    """
    names = sorted(known)
    near = nearest(name, names)
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}"


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """Return the known names that `name` is a slip of, nearest first: few letters differ, the same words
    stand in another order, one name begins with the other or shortens it (bf16). Names that merely share
    letters, such as question and solution, are not near.

    Example:
        >>> nearest("learning_rte", ["learning_rate", "lr", "seed"])
        ['learning_rate']
    """
    slips: list[tuple[int, str]] = []
    shorter: list[str] = []
    asked = _folded(name[:_LONGEST_NAME])
    for other in dict.fromkeys(known):
        there = _folded(other[:_LONGEST_NAME])
        longer = max(len(asked), len(there))
        allowed = 1 if longer < 6 else 2 if longer < 12 else 3
        distance = _edits(asked, there)
        if sorted(asked.split("_")) == sorted(there.split("_")):
            slips.append((0, other))
        elif distance <= min(allowed, len(asked) - 1):
            slips.append((distance, other))
        elif _begins(asked, there) or _abbreviates(asked, there):
            shorter.append(other)
    return [other for _, other in sorted(slips)][:most] or sorted(shorter)[:most]


_LONGEST_NAME = 80


def _folded(name: str) -> str:
    return name.strip("-").replace("-", "_").lower()


def _begins(one: str, other: str) -> bool:
    return min(len(one), len(other)) >= 3 and (one.startswith(other) or other.startswith(one))


def _abbreviates(short: str, long: str) -> bool:
    """Whether letters of `long` are left out in the middle, at most half of them."""
    letters = iter(long)
    ends = short[:1] == long[:1] and short[-1:] == long[-1:]
    return ends and len(short) >= 4 and len(short) * 2 >= len(long) and all(c in letters for c in short)


def _edits(one: str, other: str) -> int:
    """The letters to insert, remove, replace or swap with their neighbour to make one word of the other."""
    rows = [list(range(len(other) + 1))]
    for i, left in enumerate(one, start=1):
        row = [i]
        for j, right in enumerate(other, start=1):
            cost = min(rows[-1][j] + 1, row[j - 1] + 1, rows[-1][j - 1] + (left != right))
            if i > 1 and j > 1 and left == other[j - 2] and one[i - 2] == right:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]


def together(errors: Sequence[LockstepError]) -> LockstepError:
    """Return one error with the texts of all: of the first one's class, code and fields; the field
    `problems` has the data of each. One error alone is returned as it is."""
    if len(errors) == 1:
        return errors[0]
    first = errors[0]
    lines = "\n  ".join(str(error).replace("\n", "\n  ") for error in errors)
    problems = [each for error in errors for each in _problems(error)]
    joined = first.with_message(f"{len(errors)} problems\n  {lines}", problems=problems)
    joined.parts = tuple(errors)
    return joined


def _problems(error: LockstepError) -> list[dict[str, Any]]:
    own = error.data
    inside = own.pop("problems", None)
    return inside if isinstance(inside, list) else [own]


# Secrets are taken out of every text that leaves the process: errors, logs, files, the terminal.
#
#     hide(token)                                  as soon as one is known
#     redacted(f"the service says {reply!r}")      the service says '... Bearer [secret] ...'
#
# Values of environment variables with the name of a secret, such as HF_TOKEN, and the passwords of proxies
# are known without `hide`. Texts are often cut: what is left of a secret is taken out too, down to a few
# characters.


SECRET = "[secret]"
_SHORTEST = 8
"""Characters of a value that is taken out: a shorter one would be found in other words, and protects
nothing."""
_LEFT = 6
"""Characters of a secret's beginning or end that are taken out where a text was cut."""
_NAME = re.compile(
    r"(^|[_-])(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY"
    r"|SECRET_?KEY|AUTH|AUTHORIZATION)$",
    re.IGNORECASE,
)
_hidden: set[str] = set()


def hide(value: str) -> None:
    """Take a value of 8 characters or more out of every later text; one of several lines, such as a private
    key, also where its lines stand alone: what is printed comes by lines."""
    _hidden.update(part for part in (value, *value.splitlines()) if len(part) >= _SHORTEST)


def names_secret(name: str) -> bool:
    """Whether an environment variable or an argument of this name has a secret for its value.

    Example:
        >>> [name for name in ("HF_TOKEN", "api-key", "max_tokens", "TOKENIZERS_PARALLELISM")
        ...  if names_secret(name)]
        ['HF_TOKEN', 'api-key']
    """
    return _NAME.search(name) is not None


def redacted(text: str) -> str:
    """Return the text with every secret in it replaced, also as JSON or a url has it."""
    for secret in sorted(_secrets(), key=len, reverse=True):
        for form in {secret, json.dumps(secret)[1:-1], quote(secret, safe=""), repr(secret)[1:-1]}:
            if form in text:
                text = text.replace(form, SECRET)
        text = _without_rest(text, secret)
    return text


def _secrets() -> Iterator[str]:
    yield from _hidden
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and names_secret(name) and not value.startswith(("/", "~/")):
            yield value  # a path, as of GOOGLE_APPLICATION_CREDENTIALS, is none
        elif name.upper().endswith("_PROXY"):
            user, _, password = value.rpartition("://")[2].rpartition("@")[0].partition(":")
            known = (f"{user}:{password}", password, unquote(password)) if password else ()
            yield from (each for each in known if len(each) >= _SHORTEST)


def _without_rest(text: str, secret: str) -> str:
    """The text without a secret's beginning at its end, and without a secret's end at its beginning."""
    at = text.rfind(secret[:_LEFT])
    while at >= 0:
        size = _common(text[at : at + len(secret)], secret)
        # Cut where the text, a line or a quotation ends: what follows is not the secret's next character.
        if size >= _LEFT and (size == len(text) - at or text[at + size] in "'\"\n\\…"):
            text = f"{text[:at]}{SECRET}{text[at + size :]}"
        at = text.rfind(secret[:_LEFT], 0, at)
    begins = text[:_LEFT]
    at = secret.find(begins, 1) if len(begins) == _LEFT else -1
    while at >= 0:
        if text.startswith(secret[at:]):
            return SECRET + text[len(secret) - at :]
        at = secret.find(begins, at + 1)
    return text


def _common(text: str, secret: str) -> int:
    count = 0
    for one, other in zip(text, secret, strict=False):
        if one != other:
            break
        count += 1
    return count
