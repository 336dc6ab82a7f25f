"""Secrets are taken out of every text that leaves the process: errors, logs, files, the terminal.

    hide(token)                                  as soon as one is known
    redacted(f"the service says {reply!r}")      the service says '... Bearer [secret] ...'

Values of environment variables with the name of a secret, such as HF_TOKEN, and the passwords of proxies are
known without `hide`. Texts are often cut: what is left of a secret is taken out too, down to a few
characters.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote

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
