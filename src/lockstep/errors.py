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
    """A dataset, a row or a prompt is not what it must be."""


class RewardError(LockstepError, RuntimeError):
    """A reward raised, timed out, or returned something that is not a finite number."""


class ModelError(LockstepError, ValueError):
    """A model cannot be loaded, or its architecture is not supported."""


class EngineError(LockstepError, RuntimeError):
    """An inference engine failed or returned something inconsistent."""


class TrainError(LockstepError, RuntimeError):
    """A train step cannot go on."""


class CheckpointError(LockstepError, ValueError):
    """A checkpoint is missing, damaged, or belongs to something else."""


class RecordingError(LockstepError, ValueError):
    """A recording is missing, damaged, hostile, or does not fit the model it is replayed on."""


class ParityError(LockstepError, AssertionError):
    """Two things that must agree do not."""


CODES = {
    "unknown-name": (
        "A name is none of those that are known here. The message lists them and the nearest ones."
    ),
    "unknown-setting": "There is no such setting, flag or argument. The message names the nearest ones.",
    "missing-setting": "A setting or flag that is needed here is not given. Give it.",
    "wrong-type": "A value is of another type than the one expected, such as a text for a number.",
    "out-of-range": "A number is outside of what is allowed. The message has the bounds.",
    "wrong-format": "A text is not of the form expected. The message shows the form.",
    "no-effect": "A setting would have no effect with the others. Leave it out, or set what it needs.",
    "secret-in-config": (
        "A setting holds a secret. Write the name of an environment variable, or of a file of mode 0600."
    ),
    "contradiction": (
        "Two settings or flags exclude each other, or their values do not fit together. Change one."
    ),
    "unsupported-combination": (
        "Settings that cannot be used together here. The message says which one to change."
    ),
    "not-divisible": "A number must be a multiple of another one, and is not.",
    "duplicate": "Something that may be named once is named twice, or stands twice in a file.",
    "nothing-to-do": "With these settings nothing would be trained, recorded, measured or compared.",
    "not-enough": "There is less than is asked for: data, prompts, nodes. Ask for less, or give more.",
    "endless": "A source without an end was given where all of it is needed. Set its size.",
    "ambiguous": "Several things fit. Name one of them.",
    "missing-package": (
        "A Python package or program is not installed. The message has the command that installs it."
    ),
    "missing-device": "This machine has no such device, or the work is not possible on this kind of device.",
    "wrong-environment": (
        "An environment variable, or the environment of this process, is not what it must be."
    ),
    "unsupported-version": "The version of a package or server, or of what it wrote, is not supported.",
    "wrong-part": (
        "A part of yours (backend, engine, reward, ...) cannot be loaded, or lacks what it must have."
    ),
    "missing-argument": "A part was made without an object that it needs.",
    "no-such-file": "There is no such file or folder.",
    "not-a-file": "A plain file or a folder was expected, and the path is something else.",
    "bad-file-name": "No file can have this name.",
    "already-exists": "The output exists already. Name another, or say that the present one may be used.",
    "cannot-read": "A file or folder cannot be read. The message has the cause.",
    "cannot-write": "A file or folder cannot be made, written or removed. The message has the cause.",
    "no-space": "The disk is full, or has less space than is needed.",
    "not-text": "Bytes are not text in UTF-8, or text holds what no encoding can write.",
    "leads-out-of-folder": "A link or a name leads out of the folder that it must stay in.",
    "too-large": "More bytes, values or entries than are read, or than fit.",
    "too-deep": "Lists, tables or archives are nested more deeply than is read.",
    "not-json": "Not valid JSON.",
    "not-toml": "Not valid TOML.",
    "damaged-file": "A file is damaged. Fetch or copy it again.",
    "wrong-field": "A field of a file has a value that it cannot have. The file was edited, or is damaged.",
    "missing-field": "A file lacks a field that it must have.",
    "version-differs": (
        "Two sides are of different versions: a file and this Lockstep, a node and another one."
    ),
    "hash-differs": "The content of a file does not match its checksum. It is damaged or was edited.",
    "mixed-files": "Files of two saves or recordings are mixed. Restore all of them from one.",
    "incomplete": (
        "Files or lines are missing from what was written. Restore them, or run what wrote them again."
    ),
    "out-of-order": "Lines of a file are out of order, or there twice.",
    "wrong-kind-of-file": (
        "The file or folder is readable, and not what is expected there: no run, no recording, ..."
    ),
    "locked": "Another process uses it. Wait for it or end it.",
    "forbidden-content": "A file asks for what would execute code, and nothing of it was executed.",
    "wrong-row": "A row of a dataset is not what it must be. Correct it.",
    "missing-column": (
        "The rows have no such column, or one of them does not. Rename it, or set another name."
    ),
    "empty": "A prompt, a document or a text is empty.",
    "too-long": "A text, document or path is longer than fits.",
    "outside-vocabulary": "A token id is outside of the model's vocabulary.",
    "no-tokenizer": "Text is to be read or written and the model has no (fitting) tokenizer.",
    "no-chat-template": "A conversation needs a chat template and there is none.",
    "unsupported-chat-template": "The chat template cannot be used for this purpose.",
    "nothing-left": "No rows, prompts, inputs or losses are left after what was asked for.",
    "wrong-pairs": "Answers do not make the pairs, or the two kinds, that the loss compares.",
    "unsupported-model": "The model's architecture, config or code is not supported.",
    "wrong-shape": "A tensor, a list or a result has another shape or number of entries than it must have.",
    "wrong-weights": "Names of weights are unknown, missing, or came twice.",
    "other-model": "Files, weights, a server or a tokenizer are of another model than this one.",
    "batch-dependent": "The results of a model depend on what else is in the batch.",
    "not-batch-invariant": (
        "Something has no batch-invariant form. Set train.batch_invariant = false, or change it."
    ),
    "kernels-differ": "Trainer and generator do not compute with the same kernels.",
    "values-differ": "Two things that must hold equal values do not.",
    "wrong-state": "The call is not possible now: closed, asleep, busy, in an update, done already.",
    "wrong-result": "An engine or a part of yours returned what it was not asked for.",
    "bad-reply": "A reply is malformed, or its status is an error.",
    "refused": (
        "A server, library, program or template refused what it was given. The message has its reason."
    ),
    "unreachable": "Nothing answers at the address, or the connection broke.",
    "deadline": "Something did not happen in time. The message names the setting with the time.",
    "process-died": "A process ended, or could not be started. The message names its log.",
    "port-in-use": "Another process has the port.",
    "server-settings": (
        "A server was started with other settings than this run needs. The message has the flag."
    ),
    "transfer-failed": "Weights could not be carried from the trainer to the engine.",
    "unsupported-sampling": "The engine cannot honour a sampling parameter.",
    "unrequested-abort": "The engine aborted samples and was not asked to; somebody else uses it.",
    "not-authenticated": "A token or a secret is missing or wrong, or a cluster asks nobody for one.",
    "not-ours": "Another user of the machine owns or may change a file or folder that has to be ours alone.",
    "not-finite": "A loss, a gradient, a score or a logprob is NaN or infinite.",
    "out-of-memory": "The memory of a device or of the machine is too small. The message says what to lower.",
    "no-gradients": "There are no gradients to step with.",
    "missing-values": "A batch lacks what the loss needs, such as ref_logprobs.",
    "wrong-batch": "Samples or a batch are of another kind than the loss or the packer takes.",
    "too-many-recompiles": "Code was compiled again more often than train.max_recompiles allows.",
    "ranks-differ": "Ranks were given different settings, data or micro-batches.",
    "out-of-step": "A rank waits for another one that does something else, or has gone.",
    "peer-failed": "This rank ends because another one failed or has gone.",
    "not-resumable": "A run cannot go on with these settings.",
    "equal-rewards": "Too few groups have rewards that differ.",
    "reward-failed": "A reward raised, timed out, or returned no finite number.",
    "cell-failed": "One of two compared configurations raised an error.",
}
"""The kinds of mistakes: what each code means, and what to do about it."""


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
