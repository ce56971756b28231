"""The prepared form of a data set: .npy arrays to map into memory, checked against meta.json.

meta.json holds names, counts, scale and the length and SHA-256 of every array, and is sealed by a
SHA-256 of its own: a flipped byte anywhere is found. Nothing here is pickled, and only the three
file names below are ever opened.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flrce.core.files import format_path, open_regular, read_limited, validate_regular
from flrce.core.host import sync_folder
from flrce.data.readers import read_dataset
from flrce.data.sources import IGNORED_TARGET, Source
from flrce.errors import BadInput

CACHE_VERSION = 1
META_FILE = "meta.json"
MAX_META_BYTES = 256 << 20
PREPARE_REMEDY = "prepare the data set again"

ARRAY_NAMES = ("x", "y", "group", "held")
ArrayFile = Literal["x.npy", "y.npy", "group.npy", "held.npy"]


class FileEntry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class DatasetMetadata(BaseModel):
    """meta.json; `seal` is the SHA-256 of the same text with an empty seal."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    version: int
    name: str
    classes: list[str]
    groups: list[str]
    counts: list[int]  # samples of each class; of other kinds, of all
    shape: list[int]  # of x
    scale: float = Field(allow_inf_nan=False)
    shift: float = Field(allow_inf_nan=False)
    files: dict[ArrayFile, FileEntry]
    seal: str = ""
    kind: Literal["values", "tokens", "labels"] | None = None  # None: classes

    def to_json_text(self) -> str:
        return json.dumps(self.model_dump(exclude_none=True), indent=1) + "\n"

    def with_seal(self) -> "DatasetMetadata":
        blank = self.model_copy(update={"seal": ""})
        return self.model_copy(
            update={"seal": hashlib.sha256(blank.to_json_text().encode()).hexdigest()}
        )


def get_data_folder() -> Path:
    """Where prepared sets live: $FLRCE_DATA, else flrce/data in the user's cache."""
    if named := os.environ.get("FLRCE_DATA"):
        return Path(named).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "flrce" / "data"


def prepare_dataset(
    name: str, source_dir: Path, folder: Path | None = None, progress: bool = False
) -> Path:
    """Read a data set's public files and write its prepared form; default folder: home()/name."""
    return write_prepared(
        read_dataset(name, source_dir, progress), folder or get_data_folder() / name
    )


def write_prepared(source: Source, folder: Path) -> Path:
    """Write a source beside the folder, sync it, and rename it into place of an earlier cache."""
    _validate_source(source, "the source")
    folder = folder.resolve()  # a link keeps pointing to where it points
    occupied = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if occupied and not (folder / META_FILE).is_file():
        raise BadInput(
            f"{format_path(folder)} exists and is no prepared data set; name another folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        aside.chmod(0o755)  # mkdtemp's 0700 would lock out other users of a shared cache
        files = {}
        for name in ARRAY_NAMES:
            if (array := getattr(source, name)) is not None:
                files[f"{name}.npy"] = _save_array(aside / f"{name}.npy", array)
        meta = _build_metadata(source, files).with_seal()
        _write_synced(aside / META_FILE, meta.to_json_text().encode())
        sync_folder(aside)
        _replace_folder(folder, aside)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _refuse(path: Path, problem: str) -> BadInput:
    return BadInput(f"{format_path(path)} {problem}; {PREPARE_REMEDY}")


def load_prepared(folder: Path, verify: bool = True) -> Source:
    """The source of a prepared folder, mapped into memory. `verify`: check every file's SHA-256."""
    meta = _read_metadata(folder)
    for name, entry in meta.files.items():
        _check_file(folder / name, entry, verify)
    arrays: dict[str, Any] = {
        name: _map_array(folder / f"{name}.npy") if f"{name}.npy" in meta.files else None
        for name in ARRAY_NAMES
    }
    how = {"scale": meta.scale, "shift": meta.shift, "kind": meta.kind or "classes"}
    names = {"classes": tuple(meta.classes), "groups": tuple(meta.groups)}
    source = Source(meta.name, **arrays, **names, **how)  # type: ignore[arg-type]
    if verify:
        _validate_source(source, format_path(folder))
    x, y = source.x, source.y
    if list(x.shape) != meta.shape or len(y) != len(x) or sum(meta.counts) != len(x):
        raise _refuse(folder, f"has arrays of other shapes than {META_FILE} says")
    return source


def _build_metadata(source: Source, files: dict[str, FileEntry]) -> DatasetMetadata:
    try:
        return DatasetMetadata.model_validate(
            {
                "version": CACHE_VERSION,
                "name": source.name,
                "classes": list(source.classes),
                "groups": list(source.groups),
                "counts": _count_class_samples(source),
                "shape": list(source.x.shape),
                "scale": float(source.scale),
                "shift": float(source.shift),
                "files": files,
                "kind": None if source.kind == "classes" else source.kind,
            }
        )
    except ValidationError as why:
        raise BadInput(
            f"the source cannot be described: {_format_first_error(why)}; correct that field"
        ) from why


def _read_metadata(folder: Path) -> DatasetMetadata:
    path = folder / META_FILE
    remedy = f"it is no prepared data set, or damaged: {PREPARE_REMEDY}"
    raw = read_limited(path, MAX_META_BYTES, remedy)
    try:
        meta = DatasetMetadata.model_validate(json.loads(raw))
    except ValidationError as why:
        problem = f"is not of schema version {CACHE_VERSION}: {_format_first_error(why)}"
        raise _refuse(path, problem) from why
    except (ValueError, RecursionError) as why:
        raise _refuse(path, "is no complete json") from why
    if meta.version != CACHE_VERSION:
        problem = f"has schema version {meta.version}, this flrce reads {CACHE_VERSION}"
        raise _refuse(path, problem)
    if meta.with_seal().to_json_text().encode() != raw:
        raise _refuse(path, "was changed since it was written")
    if not {"x.npy", "y.npy"} <= set(meta.files):
        raise _refuse(path, "names no x.npy and y.npy")
    return meta


def _format_first_error(why: ValidationError) -> str:
    error = why.errors()[0]
    return f"{'.'.join(map(ascii, error['loc']))}: {error['msg']}"


def _count_class_samples(source: Source) -> list[int]:
    if source.kind != "classes":
        return [len(source.y)]
    return [int(count) for count in np.bincount(source.y, minlength=len(source.classes))]


#: what y may be: dtypes, axes
TARGET_FORMATS = {
    "classes": ("i8", (1,)),
    "values": ("f4", (1, 2)),
    "tokens": ("i8", (1, 2)),
    "labels": ("u1 f4", (2,)),
}


def _validate_source(source: Source, where: str) -> None:
    """Refuses arrays that training would trip over."""
    x, y = source.x, source.y
    dtypes, axes = TARGET_FORMATS[source.kind]
    if x.dtype not in (np.uint8, np.float32, np.int64) or y.shape[:1] != x.shape[:1]:
        raise BadInput(
            f"{where} needs x (N, ...) uint8, float32 or int64 ids and y (N,), got {x.dtype}"
            f" {x.shape}, {y.shape}"
        )
    if not any(y.dtype == dtype for dtype in dtypes.split()) or y.ndim not in axes:
        raise BadInput(
            f"{where} needs y of {dtypes} with {axes[-1]} axes for {source.kind}, got {y.dtype}"
            f" {y.shape}"
        )
    if problem := _find_wrong_values(source):
        raise BadInput(f"{where} {problem}; {PREPARE_REMEDY}")


def _find_wrong_values(source: Source) -> str:
    """What training would trip over in arrays of the right form; "" if nothing."""
    x, y, group, held = source.x, source.y, source.group, source.held
    coded = source.kind in ("classes", "tokens") and len(y) > 0
    if coded and not _has_valid_codes(y, len(source.classes), source.kind):
        return f"has labels beyond its {len(source.classes)} classes"
    if x.dtype == np.int64 and x.size and int(x.min()) < 0:
        return "has token ids below 0"
    if held is not None and (held.dtype != np.bool_ or held.shape != x.shape[:1]):
        return f"needs held (N,) bool, got {held.dtype} {held.shape}"
    if group is None:
        return ""
    if group.dtype != np.int64 or group.shape != y.shape[:1]:
        return f"needs group (N,) int64, got {group.dtype} {group.shape}"
    if len(group) and not 0 <= int(group.min()) <= int(group.max()) < len(source.groups):
        return f"has group codes beyond its {len(source.groups)} groups"
    return ""


def _has_valid_codes(y: NDArray[np.int64], classes: int, kind: str) -> bool:
    known = y[y != IGNORED_TARGET] if kind == "tokens" else y
    return not known.size or 0 <= int(known.min()) <= int(known.max()) < classes


def _check_file(path: Path, entry: FileEntry, verify: bool) -> None:
    try:
        size = validate_regular(path, PREPARE_REMEDY)
        if size != entry.bytes:
            raise _refuse(path, f"has {size:,} bytes instead of {entry.bytes:,}")
        if not verify:
            return
        with open_regular(path, PREPARE_REMEDY) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as why:
        raise _refuse(path, f"cannot be read ({why.strerror})") from why
    if digest != entry.sha256:
        raise _refuse(path, "was changed since it was written (SHA-256 differs)")


def _map_array(path: Path) -> Any:
    try:
        return npy.open_memmap(path, mode="r")  # np.load would take a zip file for arrays, too
    except (ValueError, OSError, EOFError, OverflowError) as why:
        raise _refuse(path, "is no plain .npy") from why


def _save_array(path: Path, array: np.ndarray[Any, Any]) -> FileEntry:
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(bytes=path.stat().st_size, sha256=digest)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _replace_folder(folder: Path, aside: Path) -> None:
    """Rename into place. An old cache is first renamed, then removed."""
    if not folder.exists() or not any(folder.iterdir()):
        os.rename(aside, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    os.rename(folder, old)
    try:
        os.rename(aside, folder)
    except OSError:
        os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
