"""What leaves the machine with a study, and what does not. Every text of an archive goes through one Redactor.

Taken out, each replaced by a word in brackets that says what stood there:

    [secret]        values under names like TOKEN, PASSWORD or API_KEY, in mappings and as NAME=value; bearer tokens;
                    keys in well-known formats (hf_…, sk-…, ghp_…, AKIA…, JSON web tokens); passwords in URLs; and every
                    value that a variable of such a name has in the environment of the export
    [path-1]/name   absolute paths and ~/…: the folder goes, the last name stays, the same folder is the same number
    [study]/…       paths inside the study's own folder
    [host]          this machine's names and those in study.json
    [address]       IPv4 addresses but for 127.0.0.1 and 0.0.0.0
    [email]         e-mail addresses
    [user]          the user's name, and names of home folders met in paths

Not recognised: a secret in a format of its own under a harmless name, a name of a colleague or customer in a model's
name, an IPv6 address. Read study.json and records.jsonl of the archive before it leaves your hands.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SECRET, HOST, ADDRESS, EMAIL, USER, STUDY = "[secret]", "[host]", "[address]", "[email]", "[user]", "[study]"

_SECRET_NAME = re.compile(
    r"(?i)secret|passw(or)?d|credential|api[-_]?key|access[-_]?key|private[-_]?key|auth|bearer|cookie|(^|[-_])token$|_key$"
)
_KEY = (
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|AKIA[A-Z0-9]{12,}|xox[abprs]-[\w-]{10,}|nvapi-[\w-]{16,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"
)
_SECRETS = re.compile(
    rf"(?P<key>\b(?:{_KEY}))"
    r"|(?P<bearer>(?i:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"
    r"|(?P<scheme>\b[a-z][\w+.-]*://)[^\s/@'\"]+@"
    r"|(?P<name>(?i:\b[\w-]*(?:secret|passw(?:or)?d|api[-_]?key|access[-_]?key|token|credentials?))['\"]?\s*[=:]\s*['\"]?)"
    r"(?P<value>[^\s'\",;&}\]]+)"
)
# What may follow "token:" in a log without being one.
_HARMLESS = re.compile(r"(?i)\d+(\.\d+)?|none|null|true|false|auto|ids?|\[secret\]|")
_SEGMENT = r"[\w.@+%=,~-]+"
# The second form also where a letter stands before it, as in -I/home/…
_PATH = re.compile(rf"(?<![\w.\]/~-])(?:~[\w.-]*|)(?:/{_SEGMENT})+/?|/(?:home|Users|root)(?:/{_SEGMENT})+/?")
_FILE_URL = re.compile(r"\b((?:sqlite|file)(?:\+\w+)?:/{2,3})(/[^\s'\"]+)")
_ROUTE = re.compile(
    r"/(v1(/.*)?|health|metrics|tokenize|detokenize|version|ping|server_info|reset_\w+|invocations|load)/?$"
    r"|/(dev|proc|sys)(/.*)?$"
)
_HOME = re.compile(r"/(?:home|Users)/([\w.-]+)|~([\w.-]+)")
_ADDRESS = re.compile(r"(?<![\w.])(?!127\.0\.0\.1\b|0\.0\.0\.0\b)(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
# Names that stand for no particular machine or person, and words too short to be told from others.
_COMMON = {
    "root",
    "user",
    "ubuntu",
    "admin",
    "localhost",
    "node",
    "host",
    "worker",
    "server",
    "runner",
    "sweep",
    "vllm",
}
_SHORTEST_NAME = 3
_SHORTEST_SECRET = 6


class Redactor:
    """Replaces what must not leave. counts: how often, by kind. folders: placeholder -> last names met there."""

    def __init__(self, study_folder: Path, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self._study = str(study_folder.resolve())
        self._folders: dict[str, str] = {}
        self.folders: dict[str, set[str]] = {}
        own_hosts = {platform.node(), socket.gethostname(), socket.gethostname().partition(".")[0]}
        self._hosts = _names({*hosts, *own_hosts})
        self._users = _names({*users, *_own_users()})
        values = {v for n, v in os.environ.items() if _SECRET_NAME.search(n) and len(v) >= _SHORTEST_SECRET}
        self._values = sorted((v for v in values if not Path(v).exists()), key=len, reverse=True)

    def value(self, data: Any, name: str = "") -> Any:
        """The same JSON value with every text in it redacted; name: the key it stands under."""
        if isinstance(data, Mapping):
            return {self.text(str(k)): self.value(v, str(k)) for k, v in data.items()}
        if isinstance(data, list | tuple):
            return [self.value(v, name) for v in data]
        if isinstance(data, str):
            if data and _SECRET_NAME.search(name) and not _HARMLESS.fullmatch(data):
                return self._count("secrets", SECRET)
            return self.text(data)
        return data

    def text(self, text: str) -> str:
        """One text: a value, or a line of a log."""
        for value in self._values:
            if value in text:
                text = text.replace(value, self._count("secrets", SECRET))
        text = _SECRETS.sub(self._secret, text)
        text = _EMAIL.sub(lambda m: self._count("emails", EMAIL), text)
        text = self._without_paths(text)
        text = _ADDRESS.sub(lambda m: self._count("addresses", ADDRESS), text)
        for names, kind, word in ((self._hosts, "hosts", HOST), (self._users, "users", USER)):
            for name in sorted(names, key=len, reverse=True):
                pattern = rf"(?<![\w-]){re.escape(name)}(?![\w-])"
                text, n = re.subn(pattern, word, text, flags=re.IGNORECASE)
                self.counts += Counter({kind: n})
        return text

    def _secret(self, match: re.Match[str]) -> str:
        if match["key"]:
            return self._count("secrets", SECRET)
        if match["name"] and _HARMLESS.fullmatch(match["value"]):
            return match[0]
        kept = match["bearer"] or match["scheme"] or match["name"]
        return kept + self._count("secrets", SECRET) + ("@" if match["scheme"] else "")

    def _without_paths(self, text: str) -> str:
        if text.startswith(("/", "~/")) and not re.search(r"[\n\"'`]|: |, | [/~]", text):
            return self._path(text)  # a whole path, spaces and all
        text = _FILE_URL.sub(lambda m: m[1] + self._path(m[2]), text)
        return _PATH.sub(lambda m: self._path(m[0]), text)

    def _path(self, path: str) -> str:
        if path in ("/", "~") or _ROUTE.match(path):
            return path
        self._users |= _names(found for pair in _HOME.findall(path) for found in pair)
        self.counts["paths"] += 1
        if path == self._study or path.startswith(f"{self._study}/"):
            return STUDY + path[len(self._study) :]
        folder, _, name = path.rstrip("/").rpartition("/")
        placeholder = self._folders.setdefault(folder, f"path-{len(self._folders) + 1}")
        self.folders.setdefault(placeholder, set()).add(name)
        return f"[{placeholder}]/{name}"

    def _count(self, kind: str, word: str) -> str:
        self.counts[kind] += 1
        return word


def _names(names: Iterable[str]) -> set[str]:
    return {n for n in names if len(n) >= _SHORTEST_NAME and n.lower() not in _COMMON}


def _own_users() -> set[str]:
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container without an entry for its user
        name = ""
    return {name, Path.home().name}
