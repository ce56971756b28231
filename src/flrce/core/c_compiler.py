"""Compiling C with the user's compiler, once: shared objects are cached by the hash of all that
made them.
"""

import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

#: no -ffast-math: it would switch the whole process to flushing denormals, and sums are already
#: explicit
COMPILER_FLAGS = (
    "-O2",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-w",
)
COMPILE_TIMEOUT_SECONDS = 120
log = logging.getLogger("flrce")


class KernelUnavailable(Exception):
    """Why there is no compiled code, in one line."""


@dataclass(frozen=True)
class Processor:
    """What a generator of C must know of the processor: floats per vector, and vector registers."""

    lanes: int
    registers: int


def get_cache_folder() -> Path:
    """Where builds are kept: $FLRCE_CACHE, else $XDG_CACHE_HOME/flrce, else ~/.cache/flrce."""
    base = os.environ.get("FLRCE_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flrce"
    return (Path(base) if base else home) / "native"


def find_compiler() -> str:
    """The C compiler: $CC, else cc, gcc or clang on the path."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise KernelUnavailable(
        f"no C compiler ({', '.join(names)}) on the path; install gcc for faster training"
    )


@lru_cache
def detect_target(path: str, stamp: float) -> tuple[tuple[str, ...], str, Processor]:
    """(flags for this processor, what the compiler says of itself and of it, vectors); `stamp`
    renews the answer.
    """
    for flags in (("-march=native",), ("-mcpu=native",)):
        output = _run_command([path, *flags, "-dM", "-E", "-x", "c", os.devnull])
        if output.returncode == 0:
            macros = {
                line.split()[1] for line in output.stdout.splitlines() if len(line.split()) > 1
            }
            return flags, output.stdout, _detect_processor(macros)
    raise KernelUnavailable(f"{path} knows neither -march=native nor -mcpu=native")


def _detect_processor(macros: set[str]) -> Processor:
    if "__AVX512F__" in macros:
        return Processor(lanes=16, registers=32)
    if "__AVX2__" in macros and "__FMA__" in macros:
        return Processor(lanes=8, registers=16)
    if "__ARM_NEON" in macros and "__aarch64__" in macros:
        return Processor(lanes=4, registers=32)
    raise KernelUnavailable("the processor has none of AVX-512, AVX2 with FMA, or NEON")


def find_toolchain() -> tuple[list[str], str, Processor]:
    """(the compiler's command, its description for the cache key, the processor)."""
    path = find_compiler()
    flags, macros, machine = detect_target(path, os.stat(path).st_mtime)
    return [path, *flags, *COMPILER_FLAGS], macros, machine


def load_or_build_library(source: str, command: list[str], macros: str) -> Path:
    """The shared object for this source, from the cache or built now; others may build it at the
    same time.

    What is loaded is code: it must be ours, written by nobody else, and the bytes whose hash was
    written beside it.
    """
    key = hashlib.sha256("\0".join([source, *command, macros]).encode()).hexdigest()
    folder = get_cache_folder()
    done = folder / f"{key}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_folder_owner(folder)
        if not _is_intact(done):
            log.info("compiling kernels, kept in %s", folder)
            _compile_library(source, command, folder, done)
    except OSError as why:
        raise KernelUnavailable(
            f"no build folder at {folder} ({why.strerror}); set FLRCE_CACHE to a writable one"
        ) from why
    return done


def _compile_library(source: str, command: list[str], folder: Path, done: Path) -> None:
    with tempfile.TemporaryDirectory(
        dir=folder
    ) as scratch:  # a name that nobody can guess, and mode 0700
        text, built, mark = (Path(scratch) / name for name in ("net.c", "net.so", "net.sha256"))
        text.write_text(source)
        output = _run_command([*command, "-o", str(built), str(text), "-lm"])
        if output.returncode != 0 or not built.exists():
            raise KernelUnavailable(
                "the C compiler failed:"
                f" {next(iter(output.stderr.strip().splitlines()), 'no message')}"
            )
        built.chmod(0o500)
        mark.write_text(_hash_file(built))
        for path in (built, mark):
            with open(path, "rb") as f:
                os.fsync(f.fileno())
        os.replace(built, done)  # atomic: others see all of it or nothing
        os.replace(mark, done.with_suffix(".sha256"))


def _is_intact(path: Path) -> bool:
    """Whether this is a build of ours that is as it was; one that is not is made again."""
    try:
        with open(path, "rb", opener=_open_without_symlinks) as f:
            status = os.fstat(f.fileno())
            if (
                not stat.S_ISREG(status.st_mode)
                or status.st_uid not in (os.geteuid(), 0)
                or status.st_mode & 0o022
            ):
                return False
            return (
                hashlib.file_digest(f, "sha256").hexdigest()
                == path.with_suffix(".sha256").read_text()
            )
    except (OSError, ValueError):  # missing, a link, or a hash that is no text
        return False


def _check_folder_owner(folder: Path) -> None:
    """Unsupported unless only this user (or root) can write to the folder; our own is closed to
    others.
    """
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise KernelUnavailable(
            f"{folder} belongs to user {status.st_uid}; set FLRCE_CACHE to a folder of your own"
        )
    if status.st_mode & 0o022:
        folder.chmod(status.st_mode & 0o755)


def _hash_file(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _open_without_symlinks(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _run_command(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as why:
        raise KernelUnavailable(f"{command[0]} did not run ({type(why).__name__})") from why
