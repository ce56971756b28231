"""flrce doctor experiment.toml --out runs/a --tls certificates"""

import os
import platform
import shutil
import ssl
import stat
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flrce.cli.options import look_at
from flrce.cli.terminal import print_table
from flrce.config.experiment import Experiment
from flrce.core.files import read_limited
from flrce.core.host import get_available_memory
from flrce.core.memory_limits import estimate_server_bytes
from flrce.core.user_code import UserCodeNotImported
from flrce.errors import BadInput, format_install_command
from flrce.simulation.build import choose_device

CheckResult = tuple[str, str, str]  # what, "ok" | "warn" | "bad", finding
MIN_CLOCK_LAG, MAX_CLOCK_LAG = (
    -5,
    305,
)  # seconds that Flower lets a signed message's clock be behind or ahead
BYTES_PER_GIGABYTE = 1e9
MAX_TLS_BYTES = 1 << 20  # of a certificate or a key
TLS_REMEDY = "name the folder with the .crt, .pem and .key files"


def check_machine(
    file: Path | None,
    overrides: tuple[str, ...],
    out: Path | None,
    tls: Path | None,
    peer: float | None,
    as_json: bool,
    trust: bool = False,
) -> None:
    """Check this machine before a run. Exit code 2 if a run would fail."""
    exp = look_at(file, overrides, trust)
    lines = [
        *_check_versions(),
        *_check_device(exp),
        *_check_memory(exp),
        *_check_disk(out or Path(".")),
        *_check_clock(peer),
        *(_check_tls_files(tls) if tls else ()),
    ]
    print_table("doctor", ("what", "state", "finding"), lines, as_json)
    bad = [f"{what}: {finding}" for what, state, finding in lines if state == "bad"]
    if bad:
        raise BadInput("; ".join(bad))


def _check_versions() -> Iterator[CheckResult]:
    yield "python", "ok" if sys.version_info >= (3, 11) else "bad", platform.python_version()
    for name in ("flrce", "torch", "numpy", "safetensors", "flwr"):
        try:
            yield name, "ok", version(name)
        except PackageNotFoundError:
            if name == "flwr":
                yield name, "ok", f"not installed; {format_install_command('flower')}"
            else:
                yield name, "bad", "not installed"


def _check_device(exp: Experiment) -> Iterator[CheckResult]:
    """Where the experiment would train."""
    try:
        yield "device", "ok", f"{choose_device(exp)} (engine.device = {exp.engine.device!r})"
    except BadInput as why:
        yield "device", "bad", str(why)


def _check_memory(exp: Experiment) -> Iterator[CheckResult]:
    """The server's tables for the experiment's M and d."""
    from flrce.models.flat import make_layout

    pool = exp.data.read_source()
    try:
        where = make_layout(exp.complete_network(exp.build_network(pool)))
        recipe = exp.build_recipe()
    except UserCodeNotImported as why:
        yield "memory", "warn", f"unknown: {why}"
        return
    want = estimate_server_bytes(recipe, exp.clients, where.trainable, where.size)
    have = get_available_memory()
    text = f"M = {exp.clients}, d = {where.trainable}: about {want / BYTES_PER_GIGABYTE:.3g} GB"
    if have is None:
        yield "memory", "warn", f"{text}; how much is available is unknown here"
    else:
        state = "bad" if want > have else "warn" if want > have / 2 else "ok"
        yield "memory", state, f"{text} of {have / BYTES_PER_GIGABYTE:.1f} GB available"
    kept = 2 * want  # the checkpoint holds up to twice the tables
    yield "checkpoint", "ok", f"up to {kept / BYTES_PER_GIGABYTE:.3g} GB on disk"


def _check_disk(folder: Path) -> Iterator[CheckResult]:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    state = "bad" if free < 50e6 else "warn" if free < BYTES_PER_GIGABYTE else "ok"
    yield "disk", state, f"{free / BYTES_PER_GIGABYTE:.1f} GB free at {folder.resolve()}"
    if not os.access(folder, os.W_OK):
        yield "disk", "bad", f"{folder.resolve()} cannot be written; choose another --out"


def _check_clock(peer: float | None) -> Iterator[CheckResult]:
    """Runs only ask the monotonic clock; Flower's node authentication compares wall clocks."""
    now = time.time()
    date = datetime.fromtimestamp(now)
    state = "ok" if 2024 <= date.year < 2100 else "bad"
    yield "clock", state, date.isoformat(" ", "seconds")
    limits = f"{MIN_CLOCK_LAG} to +{MAX_CLOCK_LAG} s"
    window = f"Flower refuses signed messages from clocks outside {limits} of its own"
    if peer is None:
        yield "clock of peers", "warn", f"unknown; {window}; give --peer-clock $(ssh NODE date +%s)"
    else:
        behind = now - peer
        state = "ok" if MIN_CLOCK_LAG <= behind <= MAX_CLOCK_LAG else "bad"
        yield "clock of peers", state, f"message would look {behind:.0f} s old; {window}"


def _check_tls_files(folder: Path) -> Iterator[CheckResult]:
    """Every certificate and key of a folder: readable, in time, keys private."""
    if not folder.is_dir():
        raise BadInput(
            f"--tls {folder} is no folder; name the one with the .crt, .pem and .key files"
        )
    suffixes = (".crt", ".pem", ".key", ".pub")
    files = sorted(path for path in folder.rglob("*") if path.suffix in suffixes)
    if not files:
        yield "tls", "bad", f"{folder} holds no .crt, .pem, .key or .pub file"
    for path in files:
        text = read_limited(path, MAX_TLS_BYTES, TLS_REMEDY).decode(errors="replace")
        if "PRIVATE KEY" in text:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                yield path.name, "bad", "others may read this private key; chmod 600"
            else:
                yield path.name, "ok", "key"
        elif "BEGIN CERTIFICATE" in text:
            yield path.name, *_check_certificate(path)
        else:
            state = "ok" if path.suffix == ".pub" or "ecdsa" in text else "bad"
            yield path.name, state, text[:40].strip() or "empty"


def _check_certificate(path: Path) -> tuple[str, str]:
    try:
        certificate = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
    except (ssl.SSLError, ValueError) as why:
        return "bad", f"no valid certificate: {why}"
    days = (ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()) / 86400
    state = "bad" if days < 0 else "warn" if days < 30 else "ok"
    return state, f"certificate, {days:.0f} days left"
