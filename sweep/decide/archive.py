"""A study as one file for another machine: a zip of what is needed to open it, pick from it and continue it.

In it, redacted (decide/redaction.py): study.json, records.jsonl, verifications.jsonl, status.json, the specification
and resolved arguments of every launch; as they are: the corpus's token ids and the log-probabilities that quality is
compared with; if asked, the per-request Parquet files with their summaries, error texts redacted. Never: server, worker
and client logs, Optuna's journal (rebuilt from the records) and the database URL. MANIFEST.json lists every file with
its size and sha256, and what was taken out.

Import trusts nothing: only names of these forms, each listed in the manifest with its size and checksum, none twice,
none that leaves the folder; it unpacks beside the target and moves it there whole, once it opens as a study. A checksum
inside a file protects from damage, not from an author: compare the sha256 that export printed (`--sha256`).

A path that was taken out is [path-N]/name. `relocate` says where folder N is here; identities of engine configs, which
contain the model's path, are then computed anew, so that a continued sweep knows what is measured.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sweep.decide.opened import STUDY_FILE, Study, open_study
from sweep.decide.redaction import Redactor
from sweep.decide.wording import plural
from sweep.engine.engine_args import EngineConfig
from sweep.errors import StudyError
from sweep.launch.spec import QUALITY_DIR, RESOLVED_FILE, SPEC_FILE
from sweep.results.records import RECORDS_FILE
from sweep.results.status import STATUS_FILE
from sweep.results.verifications import VERIFICATIONS_FILE

MANIFEST = "MANIFEST.json"
FORMAT = "sweep-archive"
SCHEMA_VERSION = 1
_LINES = (RECORDS_FILE, VERIFICATIONS_FILE)
_NAME = r"[\w-][\w.-]*"
_MEMBER = re.compile(
    rf"study\.json|records\.jsonl|verifications\.jsonl|status\.json|workload/corpus\.npy|quality/{_NAME}\.npz"
    rf"|(?:launches|verifications)/{_NAME}(?:/{_NAME})?/(?:{_NAME}\.parquet|{_NAME}\.json)"
)
_PLACEHOLDER = re.compile(r"\[(path-\d+)\]")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Exported:
    """path, sha256 and size of the archive; taken_out: how much of which kind; folders: placeholder -> names in it."""

    path: Path
    sha256: str
    size: int
    files: int
    taken_out: Mapping[str, int]
    folders: Mapping[str, Sequence[str]]

    def text(self) -> str:
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(self.taken_out.items())) or "nothing was found"
        lines = [f"{self.path}  {self.size / 2**20:.1f} MiB, {plural(self.files, 'file')}", f"sha256     {self.sha256}"]
        lines += [f"taken out  {counts}"]
        lines += [f"           [{name}] held {', '.join(names[:4])}" for name, names in self.folders.items()]
        return "\n".join([*lines, "not in it  logs; read study.json and records.jsonl in it before you pass it on"])


@dataclass(frozen=True)
class Imported:
    """The study's folder here, and placeholders nobody said a place for, with the names in them."""

    path: Path
    points: int
    unplaced: Mapping[str, Sequence[str]]

    def text(self) -> str:
        lines = [f"{self.path}  {plural(self.points, 'operating point')}"]
        for name, names in self.unplaced.items():
            lines.append(
                f"left open  [{name}] ({', '.join(names[:4])}): --relocate {name}=FOLDER says where it is here"
            )
        return "\n".join([*lines, f"next       sweep front {self.path}"])


def export_archive(study: Study, path: Path, *, raw: bool = False) -> Exported:
    """Write the archive. Raises StudyError where the file exists or cannot be written."""
    path = Path(path)
    if path.exists():
        raise StudyError(f"'{path}' exists", "name another file with -o")
    redactor = Redactor(study.path, hosts=_hosts(study))
    files: dict[str, dict[str, Any]] = {}
    temporary = path.with_name(f"{path.name}.part")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in _contents(study, redactor, raw):
                archive.writestr(name, content)
                files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            folders = {name: sorted(redactor.text(n) for n in names) for name, names in redactor.folders.items()}
            archive.writestr(MANIFEST, _json(_manifest(study, files, redactor, folders, raw)))
        temporary.replace(path)
    except OSError as error:
        raise StudyError(f"cannot write '{path}': {error.strerror}", "name another file with -o") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(path, _checksum(path), path.stat().st_size, len(files), dict(redactor.counts), folders)


def import_archive(
    path: Path, to: Path | None = None, *, relocate: Sequence[str] = (), sha256: str | None = None
) -> Imported:
    """Unpack into a new study folder (default: runs/<study>). relocate: "path-1=/folder/here" of placeholders.

    Raises StudyError for whatever is no archive, damaged, unsafe, newer, in the way or not a study.
    """
    path = Path(path)
    places = dict(_place(text) for text in relocate)
    if not path.is_file():
        raise StudyError(f"no archive at '{path}'", "name the file that `sweep archive export` wrote")
    if sha256 is not None and (found := _checksum(path)) != sha256.lower():
        raise StudyError(
            f"'{path}' is another file: its sha256 is {found}", "get the right one, or ask who exported it"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = _checked_manifest(archive, path)
            unknown = sorted(places.keys() - manifest["folders"].keys())
            if unknown:
                known = ", ".join(manifest["folders"]) or "none"
                raise StudyError(f"the archive has no placeholder '{unknown[0]}'", f"it has {known}")
            target = Path("runs") / str(manifest["study"]) if to is None else Path(to)
            if target.exists():
                raise StudyError(f"'{target}' exists", "name another folder with --to")
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".import-") as temporary:
                folder = Path(temporary) / target.name
                _unpack(archive, manifest["files"], folder)
                _settle(folder, target.resolve(), places)
                points = len(open_study(folder).operating_points)
                folder.rename(target)
    except (zipfile.BadZipFile, RuntimeError, ValueError, KeyError, TypeError) as error:  # RuntimeError: encrypted
        raise StudyError(f"'{path}' is no archive or is damaged: {error}", "export it again") from error
    except OSError as error:
        raise StudyError(f"cannot import '{path}': {error}", "choose another folder with --to") from error
    left = {name: names for name, names in manifest["folders"].items() if name not in places}
    return Imported(target, points, left)


# ---------------------------------------------------------------- export


def _contents(study: Study, redactor: Redactor, raw: bool) -> Iterator[tuple[str, bytes]]:
    """Name and content of every member but the manifest, in a fixed order."""
    folder = study.path
    meta = redactor.value({**study.meta, "host": _without_node(study.meta.get("host"))})
    meta.get("config", {}).get("storage", {}).update(optuna=None)
    yield STUDY_FILE, _json(meta)
    for name in _LINES:
        if (folder / name).exists():
            yield name, _redacted_lines(folder / name, redactor)
    if (folder / STATUS_FILE).exists():
        status = redactor.value(json.loads((folder / STATUS_FILE).read_text()))
        ended = "died" if status.get("state") == "running" else status.get("state")
        yield STATUS_FILE, _json({**status, "state": ended, "jobs": [], "eta_s": None, "pid": 0})
    for name in ("workload/corpus.npy", *_relative(folder, f"{QUALITY_DIR}/*.npz")):
        if (folder / name).exists():
            yield name, (folder / name).read_bytes()
    for name in (*_relative(folder, f"*/*/{SPEC_FILE}"), *_relative(folder, f"*/*/{RESOLVED_FILE}")):
        if _MEMBER.fullmatch(name):
            yield name, _json(redactor.value(json.loads((folder / name).read_text())))
    for name in _relative(folder, "*/*/**/*.parquet") if raw else ():
        if _MEMBER.fullmatch(name):
            yield name, _redacted_parquet(folder / name, redactor)
            summary = (folder / name).with_suffix(".json")
            if summary.exists():
                yield str(Path(name).with_suffix(".json")), _json(redactor.value(json.loads(summary.read_text())))


def _relative(folder: Path, pattern: str) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.glob(pattern) if p.is_file() and not p.is_symlink())


def _redacted_lines(path: Path, redactor: Redactor) -> bytes:
    """Every whole line of a .jsonl file; what a kill cut short is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.dumps(redactor.value(json.loads(line))))
        except ValueError:
            continue
    return "".join(f"{line}\n" for line in lines).encode()


def _redacted_parquet(path: Path, redactor: Redactor) -> bytes:
    """The rows as they are, but for their error texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    for i, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            texts = [None if t is None else redactor.text(t) for t in table[field.name].to_pylist()]
            table = table.set_column(i, field, pa.array(texts, field.type))
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(None), buffer, compression="zstd")
    return buffer.getvalue()


def _hosts(study: Study) -> set[str]:
    node = str((study.meta.get("host") or {}).get("node") or "")
    return {node, node.partition(".")[0]}


def _without_node(host: Any) -> Any:
    return {k: v for k, v in host.items() if k != "node"} if isinstance(host, Mapping) else host


def _manifest(
    study: Study, files: Mapping[str, Any], redactor: Redactor, folders: Mapping[str, Any], raw: bool
) -> dict[str, Any]:
    from sweep import __version__

    return {
        "format": FORMAT,
        "schema": SCHEMA_VERSION,
        "study": re.sub(r"[^\w.-]+", "-", redactor.text(study.name)).strip(".-") or "study",
        "exported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "sweep_version": __version__,
        "raw": raw,
        "taken_out": dict(redactor.counts),
        "folders": folders,
        "files": files,
    }


# ---------------------------------------------------------------- import


def _checked_manifest(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    """The manifest, found to describe exactly the members there are. Raises StudyError."""
    names = archive.namelist()
    try:
        manifest: dict[str, Any] = json.loads(archive.read(MANIFEST))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']!r}")
        newer = manifest["schema"] > SCHEMA_VERSION
        files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
        {str(k): [str(n) for n in v] for k, v in manifest["folders"].items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise StudyError(
            f"'{path}' is not a sweep archive ({error})", "name what `sweep archive export` wrote"
        ) from error
    if newer:
        raise StudyError(
            f"'{path}' has schema {manifest['schema']}, newer than this sweep", "upgrade sweep to import it"
        )
    problems = [f"{name!r} is no file of a study" for name in files if not _MEMBER.fullmatch(name) or ".." in name]
    problems += [f"{name!r} is not in its manifest" for name in names if name not in files and name != MANIFEST]
    problems += [f"{name!r} is missing" for name in files if name not in names]
    problems += [f"{name!r} is there twice" for name in set(names) if names.count(name) > 1]
    for info in archive.infolist():
        if info.filename in files and info.file_size != files[info.filename][0]:
            problems.append(
                f"{info.filename!r} has {info.file_size} bytes, the manifest says {files[info.filename][0]}"
            )
    if not re.fullmatch(_NAME, str(manifest["study"])):
        problems.append(f"{manifest['study']!r} is no name of a study")
    if problems:
        raise StudyError(f"'{path}' is unsafe or was changed: {problems[0]}", "do not use it; have it exported again")
    return manifest


def _unpack(archive: zipfile.ZipFile, files: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Members into the folder, each counted and summed while it is written."""
    if sum(f["bytes"] for f in files.values()) > shutil.disk_usage(folder.parent).free:
        raise StudyError("the archive needs more room than is free there", "choose another folder with --to")
    for name, expected in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, left = hashlib.sha256(), int(expected["bytes"])
        with archive.open(name) as source, target.open("xb") as out:
            while (chunk := source.read(_CHUNK)) and left >= 0:
                left -= len(chunk)
                digest.update(chunk)
                out.write(chunk)
        if left or digest.hexdigest() != expected["sha256"]:
            raise StudyError(f"{name!r} in the archive was changed", "do not use it; have it exported again")


def _place(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    name = name.strip().strip("[]")
    if not folder or not re.fullmatch(r"path-\d+", name):
        raise StudyError(f"--relocate {text} is not understood", "write path-1=/folder/here")
    return name, str(Path(folder).expanduser().resolve())


def _settle(folder: Path, target: Path, places: Mapping[str, str]) -> None:
    """Make the unpacked study one of this machine: its own place, paths where they are here, identities of those."""

    def placed(text: str) -> str:
        text = _PLACEHOLDER.sub(lambda m: places.get(m[1], m[0]), text)
        return text.replace("[study]", str(target))

    names: dict[str, str] = {}
    for path in [*folder.glob("*/**/*.json"), *(folder / name for name in (STUDY_FILE, STATUS_FILE))]:
        if path.exists():
            path.write_bytes(_json(_mapped(json.loads(path.read_text()), placed)))
    for name in _LINES:
        if (folder / name).exists():
            records = [_mapped(json.loads(line), placed) for line in (folder / name).read_text().splitlines()]
            if places:
                _identities(records, names)
            (folder / name).write_text("".join(f"{json.dumps(r)}\n" for r in records))
    for path in (folder / QUALITY_DIR).glob("*.npz"):
        fingerprint, dash, run = path.stem.partition("-")
        path.rename(path.with_name(f"{names.get(fingerprint, fingerprint)}{dash}{run}.npz"))
    meta = json.loads((folder / STUDY_FILE).read_text())
    config = meta.get("config", {})
    config.get("storage", {}).update(dir=str(target.parent), optuna=None)
    engine = config.get("engine", {})
    if _PLACEHOLDER.search(str(engine.get("python") or "")):
        engine["python"] = None  # whichever runs sweep here
    (folder / STUDY_FILE).write_bytes(_json(meta))


def _identities(records: Sequence[dict[str, Any]], names: dict[str, str]) -> None:
    """Hashes and fingerprints of engine configs as they are now; names: old -> new, of all records so far."""
    for record in records:
        if isinstance(record.get("engine"), Mapping):
            engine = EngineConfig.from_dict(record["engine"])
            names[record["config_hash"]] = engine.hash
            names[record["fingerprint"]] = engine.fingerprint
    for record in records:
        for field in ("config_hash", "fingerprint", "reference_fingerprint"):
            if field in record:
                record[field] = names.get(record[field], record[field])
        config_hash, dash, label = str(record.get("point_id", "")).partition("-")
        if config_hash in names:
            record["point_id"] = f"{names[config_hash]}{dash}{label}"


def _mapped(data: Any, change: Callable[[str], str]) -> Any:
    if isinstance(data, Mapping):
        return {k: _mapped(v, change) for k, v in data.items()}
    if isinstance(data, list):
        return [_mapped(v, change) for v in data]
    return change(data) if isinstance(data, str) else data


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=1).encode()


def _checksum(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
