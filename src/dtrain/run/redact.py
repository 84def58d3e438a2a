"""What must not be written down: values whose name says that they are secret, and texts that look like one."""

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
"""Words of names, beside ``key`` as the last, whose value is a secret if it is a text: ``pad_token_id`` is a number."""

_NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?|true|false|none|null|yes|no", re.IGNORECASE)
# Each begins where a word does: a text of a million letters is looked through once, and not from each of them anew.
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
_MIN_SECRET_LENGTH = 8  # of a variable's secret that is looked for in other texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Redactor:
    """What is secret.

    Args:
        names: patterns of further names (``*`` is any text), whatever their values are.
        values: texts that are secret wherever they stand: what variables of the environment hold whose names say so.
    """

    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    def is_secret(self, name: str, value: object) -> bool:
        """Whether the value of this name is not to be shown."""
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
        """The same without what looks like a secret in it."""
        text = reduce(lambda left, secret: left.replace(secret, REDACTED), self.values, text)
        text = _TOKEN_FORMATS.sub(REDACTED, text)
        text = _URL_USER.sub(_redact_user, text) if "@" in text else text
        text = _AUTH_HEADER.sub(rf"\1\2{REDACTED}", text)
        parts, at = [], 0
        for named in _ASSIGNMENT.finditer(text):
            if named.start() < at or not self.is_secret(named[1], "a text"):
                continue
            value = _ASSIGNED_VALUE.match(text, named.end())
            if value is not None and self.is_secret(named[1], value[0].strip("\"'")):
                parts += [text[at : named.end()], REDACTED]
                at = value.end() + text.startswith("]", value.end())  # of what is redacted already
        return "".join([*parts, text[at:]])

    def redact_data(self, value: Plain, name: str = "") -> Plain:
        """Plain data without secrets; ``name`` is what it is called."""
        if name and self.is_secret(name, value):
            return REDACTED
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, Mapping):
            return {self.redact_text(key): self.redact_data(each, key) for key, each in value.items()}
        if isinstance(value, list):
            words = [each for each in value if isinstance(each, str)]  # a command line, if there is nothing else
            return [*self.redact_command(words)] if len(words) == len(value) else [self.redact_data(each) for each in value]
        return value

    def redact_command(self, words: Sequence[str]) -> list[str]:
        """A command line without secrets: ``--token abc`` as well as ``--token=abc``, and all of ``--api-keys a b``."""
        shown: list[str] = []
        option = ""
        for word in words:
            begins = word.startswith("-") and _NUMBER.fullmatch(word) is None
            secret = option and not word.startswith("--") and self.is_secret(option, word)
            shown.append(REDACTED if secret else self._redact_word(word))
            if not (secret and option.endswith("s")):
                option = word if begins and "=" not in word and not secret else ""
        return shown

    def _redact_word(self, word: str) -> str:
        """``--token=a,b c``: all of what is behind the sign, whatever is in it."""
        name, sign, value = word.partition("=")
        if sign and _OPTION_NAME.fullmatch(name) and self.is_secret(name, value):
            return f"{name}={REDACTED}"
        return self.redact_text(word)

    def redact_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables by name, those that are secret without their value."""
        return {
            name: REDACTED if self.is_secret(name, value) else self.redact_text(value) for name, value in environment.items()
        }


def make_redactor(names: Iterable[str], environment: Mapping[str, str]) -> Redactor:
    """What is secret in a process with this environment; ``names`` are patterns of the user's own."""
    only_names = Redactor(names=tuple(names))
    # A shell's ``PWD`` is its folder, which stands at the beginning of many a path.
    held = {
        value
        for name, value in environment.items()
        if name != "PWD" and len(value) >= _MIN_SECRET_LENGTH and not value.isalpha()
    }
    values = {value for name, value in environment.items() if value in held and only_names.is_secret(name, value)}
    return Redactor(names=only_names.names, values=tuple(sorted(values, key=len, reverse=True)))


def _redact_user(found: re.Match[str]) -> str:
    """A user without password is part of an address (``sftp://me@host``), a long one or one for the web is a token."""
    scheme, user, password = found.groups()
    if password is not None:
        return f"{scheme}{user}:{REDACTED}@"
    return f"{scheme}{REDACTED}@" if scheme.lower().startswith("http") or len(user) >= 20 else found[0]
