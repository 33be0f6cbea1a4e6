"""Hide secrets in command lines, settings and other text before it is stored or shown.

The name of a variable, flag or header decides, by whole words: `--api-key`, `HF_TOKEN` and `Authorization:` hold
secrets; `--author` and `--max-tokens` do not. The last word of a name counts most, so the value of `--token-file` is a
path. A name that ends in `key` counts as secret unless it is listed as harmless, because a list of services would
never be complete.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"

# Both match a name in lower case, with hyphens around and between its words: `-hf-token-`.
_SECRET = re.compile(
    r"secret|passw|passphrase|credential"  # also within a word, as in PGPASSWORD
    r"|-(?:api|access|private)-?keys?-|-\w*token-|-(?:jwt|bearer|authorization)-"
    r"|-(?:(?:db|ssh|user)?pass|pat|\w*pwd|o?auth|key|private|creds|cookies?)-$"
)
_HARMLESS = re.compile(
    r"-(?:file|path|dir|folder|env|method|type|size|dim|count|length|level|rate|dropout|embedding)-$"
    r"|-(?:pad|bos|eos|cls|sep|unk|mask|special|image|start|stop|end|max|min|per|num|new|next)-token-"
    r"|-(?:forward|backward|single|one|two|multi|first|second)-pass-$"
    r"|-(?:public|gpg|primary|foreign|sort|group|join|label|image|text|caption|input|output|target|feature|data)-key-$"
)
_FOLDERS = ("PWD", "OLDPWD")
"""Every shell sets these variables. In any other name `pwd` stands for a password."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
_HEADER = re.compile(r"([\w-]+):")
_ASSIGNED = re.compile(r"([\w.+-]+)([=:]\s*)(?=.)", re.DOTALL)
_SCHEMES = ("basic", "bearer", "digest", "token")
"""Schemes of an Authorization header. The secret is the word after the scheme."""

_URL = re.compile(r"(?i)\b(https?://)[^/\s]+@|\b([a-z][a-z0-9+.-]{0,30}://[^/\s:@]*:)[^/\s]+@")
_NAMED = re.compile(
    r"""(?<![\w.-])(?:([\w.-]{1,100})\\?["']?\s*[=:]\s*|(--?[\w.-]{1,100})\s+(?!-))"""  # NAME=, "name": or --name
)
_VALUE = re.compile(rf"""\\?"[^"]*"|'[^']*'|(?:(?i:{"|".join(_SCHEMES)})\s+)?[^\s"',;&}}\]]+""")


@functools.lru_cache(maxsize=1024)
def is_secret(name: str) -> bool:
    """Whether a variable, flag or header of this name is likely to hold a secret."""
    words = f"-{'-'.join(_WORDS.findall(name)).lower()}-"
    return name not in _FOLDERS and bool(_SECRET.search(words)) and not _HARMLESS.search(words)


def redacted(text: str) -> str:
    """Replace passwords in URLs, and the values of secret names, with `***`."""
    text = _URL.sub(lambda url: f"{url[1] or url[2]}{HIDDEN}@", text)
    kept, at = [], 0
    for name in _NAMED.finditer(text):
        value = _VALUE.match(text, name.end()) if name.start() >= at and is_secret(name[1] or name[2]) else None
        if value:
            kept += [text[at : name.end()], HIDDEN]
            at = value.end()
    return "".join([*kept, text[at:]])


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Replace possible secrets in a command line with `***`.

    The word after a flag counts as its value, unless it is a flag itself.
    """
    words, hide = [], False
    for word in map(str, argv):
        if hide and word != "--" and not _FLAG.match(word):
            words.append(HIDDEN)
            hide = word.lower() in _SCHEMES
            continue
        named = _ASSIGNED.match(word)
        words.append(f"{named[1]}{named[2]}{HIDDEN}" if named and is_secret(named[1]) else redacted(word))
        alone = _FLAG.fullmatch(word) or _HEADER.fullmatch(word)
        hide = alone is not None and is_secret(word)
    return words


def without_secret_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace possible secrets in named settings with `***`. A string counts as a command line."""

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return HIDDEN if is_secret(name) else _line(value)
        return HIDDEN if is_secret(name) and not isinstance(value, bool | None) else value

    return {name: shown(name, value) for name, value in settings.items()}


def _line(text: str) -> str:
    if not re.search(r"[\s:=]", text):  # most settings are a single word
        return text
    try:
        words = shlex.split(text)
    except ValueError:  # an open quote
        return redacted(text)
    return text if (kept := without_secrets(words)) == words else shlex.join(kept)
