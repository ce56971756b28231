"""Read an untrusted .npz: sizes are checked before unpacking, and nothing is executed."""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from flrce.core.files import open_regular, validate_memory, validate_ratio
from flrce.errors import BadInput, format_one_line

NPY_MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 10_000  # bytes of one array's description
MAX_MEMBERS = 10_000  # entries in the zip's directory
MAX_DIMENSIONS = 8
ALLOWED_DTYPE_KINDS = "biufUS"  # booleans, numbers, text


def load_npz(path: Path, names: Sequence[str] | None, where: str) -> dict[str, np.ndarray]:
    """The named arrays that the file has (None: all); BadInput if damaged, hostile or too large."""
    remedy = "save with numpy.savez(x=..., y=...)" if names else "save it again with numpy.savez"
    try:
        with open_regular(path, remedy, where=where) as file:
            if file.read(len(NPY_MAGIC)) == NPY_MAGIC:
                raise BadInput(f"{where} is a single array (.npy), not an .npz; {remedy}")
            file.seek(0)
            with zipfile.ZipFile(file) as archive:
                return _read_arrays(archive, names, where)
    except BadInput:
        raise
    except Exception as why:  # zip, inflate, numpy and its parser of headers each raise their own
        said = format_one_line(why, 120) or type(why).__name__
        raise BadInput(f"{where} is no plain .npz ({said}); {remedy}") from why


def _read_arrays(
    archive: zipfile.ZipFile, names: Sequence[str] | None, where: str
) -> dict[str, np.ndarray]:
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        raise BadInput(f"{where} has {len(members)} entries; an .npz has a few")
    if names is None:
        names = [member.filename.removesuffix(".npy") for member in members]
    wanted = {f"{name}.npy": name for name in names}
    chosen = [member for member in members if member.filename in wanted]
    if len({member.filename for member in chosen}) < len(chosen):
        raise BadInput(f"{where} holds an array twice; save it again with numpy.savez")
    sizes = [_validate_member(archive, each, wanted[each.filename], where) for each in chosen]
    validate_memory(sum(sizes), where, "give fewer samples")
    arrays = {}
    for member in chosen:
        with archive.open(member) as stream:
            arrays[wanted[member.filename]] = npy.read_array(stream, allow_pickle=False)
    return arrays


def _validate_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, where: str
) -> int:
    """An array's bytes, after a look at its entry and its header only."""
    if member.flag_bits & 1:
        raise BadInput(f"{where} is encrypted; save it without a password")
    with archive.open(member) as stream:
        shape, dtype = _read_header(stream)
        begin = stream.tell()
    if dtype.hasobject or dtype.kind not in ALLOWED_DTYPE_KINDS or dtype.names:
        raise BadInput(
            f"{where} {name} holds {format_one_line(dtype, 60)}; save numbers (or text for groups)"
        )
    if len(shape) > MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise BadInput(
            f"{where} {name} claims the shape {format_one_line(shape, 60)}; save it again with"
            " numpy.savez"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    if begin + nbytes != member.file_size:
        raise BadInput(
            f"{where} {name} claims {format_one_line(nbytes, 30)} bytes but holds"
            f" {member.file_size - begin}; save it again"
        )
    remedy = "if that is meant, save it uncompressed with numpy.savez"
    validate_ratio(nbytes, member.compress_size, f"{where} {name}", remedy)
    return nbytes


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array of format {version}")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream, max_header_size=MAX_HEADER_BYTES)
    return shape, dtype
