"""Collect the metadata of an attempt as plain data: settings, command, versions, devices and environment, without secrets."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from dtrain import launch_protocol
from dtrain.dist.init import DistInfo
from dtrain.errors import ConfigError
from dtrain.machine import recorded_variables
from dtrain.packages import git_commit, package_versions
from dtrain.run import run_files
from dtrain.typing import Plain

_MAX_DEPTH = 20
# entries of a list, characters of a text
_MAX_LENGTH = 1000
_GIT_S = 2.0
_DRIVER_VERSION = Path("/sys/module/nvidia/version")
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


def settings_to_plain(settings: Any) -> dict[str, Plain] | None:
    """Convert settings to plain data by name. Other values become text.

    Raises:
        ConfigError: ``settings`` is neither a mapping, a dataclass nor an ``argparse.Namespace``.
    """
    if settings is None:
        return None
    if not (isinstance(settings, Mapping | Namespace) or (is_dataclass(settings) and not isinstance(settings, type))):
        raise ConfigError(
            f"open_run: settings must be a mapping, a dataclass or an argparse.Namespace, got {type(settings).__name__}. "
            "Pass settings=vars(args), for example."
        )
    plain = to_plain_data(settings)
    assert isinstance(plain, dict), "a mapping becomes a dict"
    return plain


def to_plain_data(value: Any, depth: int = _MAX_DEPTH) -> Plain:
    """Convert a value to plain JSON data. Non-finite numbers and objects without a JSON form become text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int) and not isinstance(value, Enum):
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return value.name
    if depth and isinstance(value, Mapping | Namespace):
        pairs = value.items() if isinstance(value, Mapping) else vars(value).items()
        return {str(key): to_plain_data(each, depth - 1) for key, each in pairs}
    if depth and is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain_data(getattr(value, field.name, None), depth - 1) for field in fields(value)}
    if depth and isinstance(value, list | tuple | Set):
        return [to_plain_data(each, depth - 1) for each in list(value)[:_MAX_LENGTH]]
    try:
        return str(value)[:_MAX_LENGTH]
    except Exception:  # noqa: BLE001 - an error in the user's class must not stop training
        return f"<{type(value).__name__}>"


def attempt_metadata(
    attempt: int, started_at: float, all_ranks: Sequence[Mapping[str, Any]], settings: Plain, redactor: Redactor, info: DistInfo
) -> dict[str, Plain]:
    """Return the content of the file of an attempt.

    Args:
        all_ranks: ``host`` and ``device`` of each rank, in order.
        settings: plain data without secrets.
        redactor: redactor for the remaining entries.
    """
    try:
        folder = os.getcwd()
    # The folder was deleted.
    except OSError:
        folder = ""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    versions: dict[str, Plain] = {**package_versions()}
    versions |= {name: version for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)) if version}
    with suppress(OSError, UnicodeDecodeError):
        versions["driver"] = _DRIVER_VERSION.read_text(encoding="utf-8").strip()
    restarts = os.environ.get(launch_protocol.RESTART_COUNT, "")
    restart_count = int(restarts) if restarts.isascii() and restarts.isdecimal() else 0
    return {
        "format": run_files.FORMAT,
        "attempt": attempt,
        "started_at": started_at,
        "world_size": len(all_ranks),
        "hosts": _ranks_by("host", all_ranks),
        "devices": _ranks_by("device", all_ranks),
        "command": list(redactor.redact_command(sys.argv)),
        "python": sys.executable,
        "folder": folder,
        "settings": settings,
        "git": _git_info(Path(script).absolute().parent if script else Path(folder)),
        "versions": versions,
        "environment": dict(redactor.redact_variables(recorded_variables(os.environ))),
        "launch": None if info.run_dir is None else {"folder": str(info.run_dir), "restarts": restart_count},
    }


def _ranks_by(key: str, all_ranks: Sequence[Mapping[str, Any]]) -> Plain:
    ranks_by_value: dict[str, Plain] = {}
    for rank, facts in enumerate(all_ranks):
        ranks = ranks_by_value.setdefault(facts[key], [])
        assert isinstance(ranks, list)
        ranks.append(rank)
    return ranks_by_value


def _git_info(folder: Path) -> Plain:
    """Return the commit, and True if tracked files have changes, None if git is missing or slow."""
    commit = git_commit(folder)
    if commit is None:
        return None
    command = ["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]
    dirty = None
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_S, check=False)
        dirty = bool(done.stdout.strip()) if done.returncode == 0 else None
    return {"commit": commit, "dirty": dirty}


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
