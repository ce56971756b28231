"""Places that a command writes to, looked at before any work is done."""

import errno
import os
from pathlib import Path

from flrce.errors import BadInput, format_one_line
from flrce.storage.disk import make_folder


def prepare_folder(path: Path, option: str, private: bool = True) -> None:
    """Make the folder that a command writes into; BadInput if it is a file or cannot be written.

    A folder that holds runs is `private`, its owner's alone; others follow the umask.
    """
    try:
        if private:
            make_folder(path)
        else:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as why:
        is_file = why.errno in (errno.EEXIST, errno.ENOTDIR) and path.is_file()
        reason = "is a file" if is_file else why.strerror or why
        raise _describe_refusal(path, option, reason, "folder") from why
    if not os.access(path, os.W_OK | os.X_OK):
        raise _describe_refusal(path, option, "Permission denied", "folder")


def prepare_file(path: Path, option: str) -> None:
    """Make the folder of a file to write; BadInput if the file could not be written."""
    aside = path.with_name(f"{path.name}.part") if path.name else path  # what is written first
    try:
        if not path.name or path.is_dir():
            raise _describe_refusal(path, option, "is a folder", "file")
        if path.exists() and not path.is_file():
            raise _describe_refusal(path, option, "is a device or a pipe", "file")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.is_symlink()  # raises where the name is too long
    except OSError as why:
        raise _describe_refusal(path, option, why.strerror or why, "file") from why
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _describe_refusal(path, option, "Permission denied", "file")


def _describe_refusal(path: Path, option: str, reason: object, wanted: str) -> BadInput:
    return BadInput(
        f"{option} {format_one_line(path, 200)} cannot be written: {reason}; name another {wanted}"
    )
