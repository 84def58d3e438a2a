"""Redact secrets: values with a secret name, and texts in the format of a secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce

from dtrain.typing import Plain

REDACTED = "[redacted]"

_NON_ALNUM = re.compile(r"[^a-z0-9]+")
_CAMEL_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_WORDS = re.compile(
    r"password|passwd|passphrase|secret|credential|api_?keys?|private_key|access_keys?|authorization|bearer|cookie"
)
_SECRET_TEXT_WORDS = {"token", "auth", "pwd", "pass", "pat", "sas", "sig", "signature", "dsn", "webhook", "jwt"}
"""Words of names with a secret text as value, besides ``key`` as the last word. Numbers are shown, such as ``pad_token_id``.
"""

_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?|true|false|none|null|yes|no", re.IGNORECASE)
# Each pattern starts at a word boundary, so that a long text is scanned once.
_URL_USER = re.compile(r"""((?<![\w+.-])[a-zA-Z][\w+.-]*://)([^\s/?#@:'"]*)(:(?!\d+/)[^\s'"]{0,2000})?@""")
_ASSIGNMENT = re.compile(r"""(?<![\w.-])([\w.-]+)["']?\s*[=:]\s*""")
_ASSIGNED_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s"',;&}\])]+""")
_OPTION_NAME = re.compile(r"[-+~]*[\w.-]+")
_AUTH_HEADER = re.compile(r"\b(bearer|basic)(\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_TOKEN_FORMATS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)"
    r"|\b(AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\b(gh[opsur]_|hf_|npm_|[spr]k_(live|test)_)[A-Za-z0-9]{20,}"
    r"|\b(github_pat_|glpat-|sk-|xox[abeprs]-|pypi-|AIza)(?=[\w-]*\d)[\w-]{20,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    re.DOTALL,
)
# characters of a secret from the environment that is searched in texts
_MIN_SECRET_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Redactor:
    """Redactor of secret names and values.

    Args:
        names: patterns of further secret names (``*`` is any text).
        values: secret texts, redacted everywhere: the values of environment variables with secret names.
    """

    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    def is_secret(self, name: str, value: object) -> bool:
        """Return True if the value with this name must be redacted."""
        if any(fnmatchcase(name.lower().lstrip("-"), pattern.lower()) for pattern in self.names):
            return True
        if value is None or isinstance(value, bool):
            return False
        words = _NON_ALNUM.sub("_", _CAMEL_BOUNDARY.sub("_", name.removeprefix("-D")).lower())
        if _SECRET_WORDS.search(words):
            return True
        numeric = isinstance(value, int | float) or (isinstance(value, str) and _NUMBER.fullmatch(value) is not None)
        return not numeric and (words.endswith("key") or not _SECRET_TEXT_WORDS.isdisjoint(words.split("_")))

    def redact_text(self, text: str) -> str:
        """Redact the parts of a text that look like a secret."""
        text = reduce(lambda redacted, secret: redacted.replace(secret, REDACTED), self.values, text)
        text = _TOKEN_FORMATS.sub(REDACTED, text)
        text = _URL_USER.sub(_redact_user, text) if "@" in text else text
        text = _AUTH_HEADER.sub(rf"\1\2{REDACTED}", text)
        parts, end = [], 0
        for named in _ASSIGNMENT.finditer(text):
            if named.start() < end or not self.is_secret(named[1], "a text"):
                continue
            value = _ASSIGNED_VALUE.match(text, named.end())
            if value is not None and self.is_secret(named[1], value[0].strip("\"'")):
                parts += [text[end : named.end()], REDACTED]
                # An already redacted value ends with "]".
                end = value.end() + text.startswith("]", value.end())
        return "".join([*parts, text[end:]])

    def redact_data(self, value: Plain, name: str = "") -> Plain:
        """Redact plain data with the name ``name``."""
        if name and self.is_secret(name, value):
            return REDACTED
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, Mapping):
            return {self.redact_text(key): self.redact_data(each, key) for key, each in value.items()}
        if isinstance(value, list):
            # A list of texts may be a command line.
            words = [each for each in value if isinstance(each, str)]
            return [*self.redact_command(words)] if len(words) == len(value) else [self.redact_data(each) for each in value]
        return value

    def redact_command(self, words: Sequence[str]) -> list[str]:
        """Redact a command line: ``--token abc``, ``--token=abc``, and all values of ``--api-keys a b``."""
        redacted: list[str] = []
        option = ""
        for word in words:
            is_option = word.startswith("-") and _NUMBER.fullmatch(word) is None
            secret = option and not word.startswith("--") and self.is_secret(option, word)
            redacted.append(REDACTED if secret else self._redact_word(word))
            if not (secret and option.endswith("s")):
                option = word if is_option and "=" not in word and not secret else ""
        return redacted

    def _redact_word(self, word: str) -> str:
        """Redact everything after the equals sign of a secret option, such as ``--token=a,b c``."""
        name, sign, value = word.partition("=")
        if sign and _OPTION_NAME.fullmatch(name) and self.is_secret(name, value):
            return f"{name}={REDACTED}"
        return self.redact_text(word)

    def redact_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Redact the values of secret variables."""
        return {
            name: REDACTED if self.is_secret(name, value) else self.redact_text(value) for name, value in environment.items()
        }


def make_redactor(names: Iterable[str], environment: Mapping[str, str]) -> Redactor:
    """Create the redactor of a process from its environment and the user's patterns ``names``."""
    only_names = Redactor(names=tuple(names))
    # PWD is the current folder, which many paths start with.
    values = {
        value
        for name, value in environment.items()
        if name != "PWD" and len(value) >= _MIN_SECRET_LENGTH and not value.isalpha() and only_names.is_secret(name, value)
    }
    return Redactor(names=only_names.names, values=tuple(sorted(values, key=len, reverse=True)))


def _redact_user(match: re.Match[str]) -> str:
    """Redact the password of a URL. Redact a user without password if long or in a web address: probably a token."""
    scheme, user, password = match.groups()
    if password is not None:
        return f"{scheme}{user}:{REDACTED}@"
    return f"{scheme}{REDACTED}@" if scheme.lower().startswith("http") or len(user) >= 20 else match[0]
