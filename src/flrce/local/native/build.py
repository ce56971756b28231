"""Compiling generated C with the user's compiler, once: shared objects are cached by the hash of all that made them."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from flrce.local.native.blocks import Machine
from flrce.local.native.plan import Unsupported

#: no -ffast-math: it would switch the whole process to flushing denormals, and sums are already explicit
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-w")
SECONDS = 120


def cache() -> Path:
    """Where builds are kept: $FLRCE_CACHE, else $XDG_CACHE_HOME/flrce, else ~/.cache/flrce."""
    base = os.environ.get("FLRCE_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flrce"
    return (Path(base) if base else home) / "native"


def compiler() -> str:
    """The C compiler: $CC, else cc, gcc or clang on the path."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise Unsupported(f"no C compiler ({', '.join(names)}) on the path; install gcc for faster training")


@lru_cache
def target(path: str, stamp: float) -> tuple[tuple[str, ...], str, Machine]:
    """(flags for this processor, what the compiler says of itself and of it, vectors); `stamp` renews the answer."""
    for flags in (("-march=native",), ("-mcpu=native",)):
        said = _run([path, *flags, "-dM", "-E", "-x", "c", os.devnull])
        if said.returncode == 0:
            macros = {line.split()[1] for line in said.stdout.splitlines() if len(line.split()) > 1}
            return flags, said.stdout, _machine(macros)
    raise Unsupported(f"{path} knows neither -march=native nor -mcpu=native")


def _machine(macros: set[str]) -> Machine:
    if "__AVX512F__" in macros:
        return Machine(lanes=16, registers=32)
    if "__AVX2__" in macros and "__FMA__" in macros:
        return Machine(lanes=8, registers=16)
    if "__ARM_NEON" in macros and "__aarch64__" in macros:
        return Machine(lanes=4, registers=32)
    raise Unsupported("the processor has none of AVX-512, AVX2 with FMA, or NEON")


def tools() -> tuple[list[str], str, Machine]:
    """(the compiler's command, its description for the cache key, the processor)."""
    path = compiler()
    flags, macros, machine = target(path, os.stat(path).st_mtime)
    return [path, *flags, *FLAGS], macros, machine


def library(source: str, command: list[str], macros: str) -> Path:
    """The shared object for this source, from the cache or built now; others may build it at the same time."""
    key = hashlib.sha256("\0".join([source, *command, macros]).encode()).hexdigest()
    folder = cache()
    done = folder / f"{key}.so"
    if done.exists():
        return done
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            text, built = Path(scratch) / "net.c", Path(scratch) / "net.so"
            text.write_text(source)
            said = _run([*command, "-o", str(built), str(text), "-lm"])
            if said.returncode != 0 or not built.exists():
                raise Unsupported(
                    f"the C compiler failed: {next(iter(said.stderr.strip().splitlines()), 'no message')}"
                )
            os.replace(built, done)  # atomic: others see all of it or nothing
    except OSError as why:
        raise Unsupported(f"no build folder at {folder} ({why.strerror}); set FLRCE_CACHE to a writable one") from why
    return done


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as why:
        raise Unsupported(f"{command[0]} did not run ({type(why).__name__})") from why
