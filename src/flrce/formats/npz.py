"""Reading a stranger's .npz: what it claims is weighed before any of it is unpacked, and nothing in it is executed."""

import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from flrce.errors import BadInput, brief
from flrce.reading import open_regular, validate_memory, validate_ratio

NPY = b"\x93NUMPY"
HEADER = 10_000  # bytes of one array's description
MEMBERS = 10_000  # entries in the zip's directory
DIMENSIONS = 8
KINDS = "biufUS"  # booleans, numbers, text


def load(path: Path, names: Sequence[str] | None, where: str) -> dict[str, np.ndarray]:
    """Those of the named arrays that the file has (None: all); BadInput where it is damaged, hostile or too large."""
    remedy = "save with numpy.savez(x=..., y=...)" if names else "save it again with numpy.savez"
    try:
        with open_regular(path, remedy, where=where) as file:
            if file.read(len(NPY)) == NPY:
                raise BadInput(f"{where} is a single array (.npy), not an .npz; {remedy}")
            file.seek(0)
            with zipfile.ZipFile(file) as archive:
                return _arrays(archive, names, where)
    except BadInput:
        raise
    except Exception as why:  # zip, inflate, numpy and its parser of headers each raise their own
        said = brief(why, 120) or type(why).__name__
        raise BadInput(f"{where} is no plain .npz ({said}); {remedy}") from why


def _arrays(archive: zipfile.ZipFile, names: Sequence[str] | None, where: str) -> dict[str, np.ndarray]:
    members = archive.infolist()
    if len(members) > MEMBERS:
        raise BadInput(f"{where} has {len(members)} entries; an .npz has a few")
    if names is None:
        names = [member.filename.removesuffix(".npy") for member in members]
    wanted = {f"{name}.npy": name for name in names}
    found = [member for member in members if member.filename in wanted]
    if len({member.filename for member in found}) < len(found):
        raise BadInput(f"{where} holds an array twice; save it again with numpy.savez")
    needed = sum(_weighed(archive, member, wanted[member.filename], where) for member in found)
    validate_memory(needed, where, "give fewer samples")
    read = {}
    for member in found:
        with archive.open(member) as stream:
            read[wanted[member.filename]] = npy.read_array(stream, allow_pickle=False)
    return read


def _weighed(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, where: str) -> int:
    """An array's bytes, after a look at its entry and its header only."""
    if member.flag_bits & 1:
        raise BadInput(f"{where} is encrypted; save it without a password")
    with archive.open(member) as stream:
        shape, dtype = _header(stream)
        begin = stream.tell()
    if dtype.hasobject or dtype.kind not in KINDS or dtype.names:
        raise BadInput(f"{where} {name} holds {brief(dtype, 60)}; save numbers (or text for groups)")
    if len(shape) > DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise BadInput(f"{where} {name} claims the shape {brief(shape, 60)}; save it again with numpy.savez")
    nbytes = math.prod(shape) * dtype.itemsize
    if begin + nbytes != member.file_size:
        raise BadInput(
            f"{where} {name} claims {brief(nbytes, 30)} bytes but holds {member.file_size - begin}; save it again"
        )
    remedy = "if that is meant, save it uncompressed with numpy.savez"
    validate_ratio(nbytes, member.compress_size, f"{where} {name}", remedy)
    return nbytes


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"an array of format {version}")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream, max_header_size=HEADER)
    return shape, dtype
