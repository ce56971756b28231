"""Open the files that users name: regular files only, with a limit on their bytes before any memory
is taken.

Every reader of data, fleet, model and experiment files comes through here. A device, a named pipe,
a socket or a folder is refused before it is opened; a file that claims to be small and is not (as
those in /proc) is read no further than the limit; packed files are unpacked in chunks.
"""

import csv
import gzip
import io
import math
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flrce.core.host import get_available_memory
from flrce.errors import BadInput, format_one_line

CHUNK_BYTES = 1 << 20
SMALL_BYTES = 64 << 20  # reads below it are not held against the free memory
MAX_LINE_BYTES = 16 << 20
MAX_CELL_CHARACTERS = 16 << 20  # of a csv file
MAX_KEY_DOTS = 100  # of a key of TOML
TOML_TEXT = re.compile(  # strings of several lines, strings and comments; also those without an end
    r'"""(?:[^\\]|\\.)*?(?:"""|\Z)|\'\'\'.*?(?:\'\'\'|\Z)'
    r'|"(?:[^"\\\n]|\\[^\n])*"?|\'[^\'\n]*\'?|#[^\n]*',
    re.DOTALL,
)
FREE_SHARE = 0.5  # of the free memory that one file may take
# more bytes than this, unpacked from so many times fewer, are refused
BOMB_BYTES, BOMB_RATIO = (1 << 28, 200)
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def format_path(path: Path | str) -> str:
    """A path fit for one line of a message; file names are untrusted text."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def validate_regular(path: Path | str, remedy: str, where: str = "") -> int:
    """The bytes of a regular file; BadInput where there is none, or something else in its place."""
    where = where or format_path(path)
    try:
        status = os.stat(path)
    except (OSError, ValueError) as why:
        raise BadInput(f"{where} cannot be read ({_describe_error(why)}); {remedy}") from why
    return _validate_kind(status, remedy, where)


@contextmanager
def open_regular(
    path: Path | str, remedy: str, limit: int | None = None, where: str = ""
) -> Iterator[io.BufferedReader]:
    """A regular file of at most `limit` bytes, opened; errors while it is read are BadInput too."""
    where = where or format_path(path)
    validate_regular(path, remedy, where)
    try:
        # a pipe put there since does not block
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            size = _validate_kind(os.fstat(handle), remedy, where)
            if limit is not None and size > limit:
                raise BadInput(
                    f"{where} has {size:,} bytes where at most {limit:,} are expected; {remedy}"
                )
            yield file
    except OSError as why:
        raise BadInput(f"{where} cannot be read ({_describe_error(why)}); {remedy}") from why


def read_limited(
    path: Path | str, limit: int, remedy: str, expansion: float = 1.0, where: str = ""
) -> bytes:
    """The whole file, refused before it is read if it is larger than `limit` bytes.

    It is also refused where the free memory is too small for it: its reader takes `expansion` bytes
    for each of its bytes.
    """
    where = where or format_path(path)
    with open_regular(path, remedy, limit, where) as file:
        size = os.fstat(file.fileno()).st_size
        validate_memory(size * (1 + expansion), where, remedy)
        content = file.read(size + 1)
        if len(content) > size:
            content += file.read(CHUNK_BYTES)
        if (
            len(content) > size + CHUNK_BYTES
        ):  # as files in /proc, which claim to be empty and may have no end
            raise BadInput(f"{where} holds more than the {size:,} bytes of its size; {remedy}")
    return content


def read_text_limited(
    path: Path | str, limit: int, remedy: str, expansion: float = 4.0, where: str = ""
) -> str:
    """The whole file as UTF-8 text, without a byte order mark; its line ends stay as they are."""
    where = where or format_path(path)
    try:
        return read_limited(path, limit, remedy, expansion, where).decode("utf-8-sig")
    except UnicodeDecodeError as why:
        raise BadInput(f"{where} is no UTF-8 text; save it as UTF-8") from why


def read_lines(
    path: Path, limit: int, remedy: str, expansion: float = 4.0
) -> Iterator[tuple[int, bytes]]:
    """(number, line) of a file, also of a .gz, which is unpacked as it is read; lines end at line
    feeds only.
    """
    rest, number = b"", 1
    if (
        path.suffix.lower() == ".gz"
    ):  # once for nothing: one that grows too much is refused before work is done on it
        for _ in _read_chunks(path, limit, remedy, expansion):
            pass
    for chunk in _read_chunks(path, limit, remedy, expansion):
        if not rest and not chunk.strip(b"\n"):  # a bomb of line ends
            number += len(chunk)
            continue
        *lines, rest = (rest + chunk).split(b"\n")
        yield from enumerate(lines, number)
        number += len(lines)
        if len(rest) > MAX_LINE_BYTES:
            raise BadInput(
                f"{format_path(path)} line {number} has more than {MAX_LINE_BYTES:,} bytes; cut it"
                " into shorter ones"
            )
    if rest:
        yield number, rest


def _read_chunks(path: Path, limit: int, remedy: str, expansion: float) -> Iterator[bytes]:
    packed, where, total = path.suffix.lower() == ".gz", format_path(path), 0
    with open_regular(path, remedy, limit) as file:
        size = os.fstat(file.fileno()).st_size
        stream = gzip.GzipFile(fileobj=file) if packed else file
        room = free_memory() / expansion
        try:
            while chunk := stream.read(CHUNK_BYTES):
                total += len(chunk)
                if packed:
                    validate_ratio(total, size, where, "if that is meant, unpack it first")
                if total > (limit if packed else size + CHUNK_BYTES):
                    raise BadInput(
                        f"{where} holds more than {limit if packed else size:,} bytes; {remedy}"
                    )
                if total > max(room, SMALL_BYTES):
                    validate_memory(total * expansion, where, "give fewer samples")
                yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile) as why:
            raise BadInput(
                f"{where} is no usable gzip file: {format_one_line(why, 80)}; {remedy}"
            ) from why


def free_memory() -> float:
    """Bytes that one file may take here."""
    have = get_available_memory()
    return math.inf if have is None else FREE_SHARE * have


def validate_memory(needed: float, where: str, remedy: str) -> None:
    """BadInput where what is to be read would take more than its share of the free memory."""
    if needed > SMALL_BYTES and needed > (free := free_memory()):
        raise BadInput(
            f"{where} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB can be used here; {remedy}"
        )


def validate_ratio(unpacked: int, packed: int, where: str, remedy: str) -> None:
    """BadInput where a small file unpacks to so much that it must be meant to fill the memory."""
    if unpacked > BOMB_BYTES and unpacked > BOMB_RATIO * max(packed, 1):
        raise BadInput(
            f"{where} would unpack to {unpacked / 1e9:.1f} GB from {packed / 1e6:.1f} MB; {remedy}"
        )


def parse_toml(text: str) -> dict[str, Any]:
    """TOML as tables; ValueError where it is none, or nested too deep.

    Keys are counted first: the parser takes quadratic time for a key of many parts.
    """
    keys = re.split(r"[,\[\]{}=\n]", TOML_TEXT.sub("", text))
    if max(key.count(".") for key in keys) > MAX_KEY_DOTS:
        raise ValueError(f"a key has more than {MAX_KEY_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError as why:
        raise ValueError("brackets are nested too deep") from why


def parse_csv(text: str, separator: str = ",") -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row that has any; rows end where csv says so, not at every character
    Unicode knows.

    Raises csv.Error for a cell beyond MAX_CELL_CHARACTERS.
    """
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    while True:
        # one limit for the whole process: put back at once
        before = csv.field_size_limit(MAX_CELL_CHARACTERS)
        try:
            row = next(rows, None)
        finally:
            csv.field_size_limit(before)
        if row is None:
            return
        if row:
            yield rows.line_num, row


def _validate_kind(found: os.stat_result, remedy: str, where: str) -> int:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise BadInput(
            f"{where} is {KINDS.get(kind, 'something else')}, not a regular file; {remedy}"
        )
    return found.st_size


def _describe_error(why: Exception) -> str:
    return getattr(why, "strerror", None) or format_one_line(why, 120)
