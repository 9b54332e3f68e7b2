"""What no log line, error or page may show: passwords, keys and tokens, and characters that are not plainly visible."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: Stands for one.
HIDDEN = "[hidden]"

#: Settings of librdkafka, Kafka's Java clients, Spark and libpq whose values are secrets: by parts of their names.
_NAMES = ("password", "passwd", "passphrase", "secret", "credential", "token", r"jaas\.config", r"key\.pem")
_NAME = f"(?:{'|'.join((*_NAMES, 'keystore[.]key', 'kinit[.]cmd', 'oauthbearer[.]config'))})"
_IS_SECRET = re.compile(rf"{_NAME}(?!\.endpoint)", re.IGNORECASE)

#: ``name=value``, ``'name': 'value'`` and ``('name', 'value')`` in a text.
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
#: (From the start of a word only: tried from each of its letters, a long one takes seconds.)
_SAID = re.compile(
    rf"(?<![\w.-])([\w.-]*{_NAME}(?!\.endpoint)[\w.-]*['\"]?\s*[=:,]\s*)(?:{_QUOTED}|[^\s,;)}}\]]+)", re.IGNORECASE
)

#: What an URL says beside the place: ``user:password@`` (a password may hold an @) and ``?query``.
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)(?:([^\s/?#\"']*)@)?([^\s?#\"']*)(?:\?([^\s#\"']*))?", re.IGNORECASE)

#: A shorter value, or a plain word, occurs in many texts: hidden there, the gap would reveal it.
_SHORTEST = 6


def is_secret(name: str) -> bool:
    """Whether a setting of this name has a secret for its value."""
    return _IS_SECRET.search(name) is not None


def values_of(config: Mapping[str, object]) -> tuple[str, ...]:
    """The secrets in a configuration, the longest first: such settings, and what URLs say beside the place."""
    found: set[str] = set()
    for name, value in config.items():
        if not isinstance(value, str):
            continue
        if is_secret(str(name)):
            found.add(value)
        for _, user, _, query in _URL.findall(value):
            found |= {user, query}
    forms = found | {repr(value)[1:-1] for value in found}  # in the repr of a mapping newlines are escaped
    return tuple(
        sorted((each for each in forms if len(each) >= _SHORTEST and not each.isalpha()), key=len, reverse=True)
    )


def hide(text: str, values: Iterable[str]) -> str:
    """The text without these."""
    for value in values:
        text = text.replace(value, HIDDEN)
    return text


def scrub(text: str) -> str:
    """The text without what it calls a secret itself: ``password=…``, ``'sasl.password': '…'``, ``scheme://user:…@``."""
    text = _URL.sub(_without_extras, text)
    return _SAID.sub(rf"\g<1>{HIDDEN}", text)


def _without_extras(found: re.Match[str]) -> str:
    scheme, user, place, query = found.groups()
    return scheme + (f"{HIDDEN}@" if user else "") + place + (f"?{HIDDEN}" if query else "")


def visible(text: str) -> str:
    """The text with everything that is not plainly visible escaped: controls, bidi and zero-width marks, odd spaces.

    Text from elsewhere is made safe so for terminals, logs and pages: any client that may append can write ids to the
    log. An id may hold an escape sequence that renames the terminal's window, a bidi override that shows another name
    than it is, a line separator that begins a new line in a log.

    ``str.isprintable`` is false for just those: categories C* and Z*, except the space.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
