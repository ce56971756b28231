"""Files of data, traces, carbon intensities and profiles as users have them, and what may become of
them.
"""

import gzip
import io
import json
import os
import pickle
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flrce.core.files import read_lines
from flrce.data.user import from_path
from flrce.devices import carbon, costs, traces
from flrce.errors import BadInput
from flrce.formats.tokenizers import load_json_tokenizer

EVENTS = (
    "2020-01-31 10:00:00\tbattery_charged_on\n2020-01-31 11:00:00\twifi\n2020-01-31"
    " 12:00:00\tbattery_charged_off"
)
TRACE = {"active": [0, 100], "inactive": [50, 200], "finish_time": 300}
HOURS = {"DE": np.arange(48.0), "DE_start": "2020-01-01T00:00"}
WORDS = [
    b"[" * 3000,
    b"9" * 5000,
    b"\n",
    b"{",
    b"\xff",
    b"NaN",
    b"1e999",
    b"null",
    b",",
    b"-1",
    b"0001-01-01",
    b"inf",
    b'"',
    b"9999-12-31 23:59:59+00:00",
    b"\x00" * 8,
    b"1e308",
    b"\xff\xff\xff\x7f",
    b"\x80\x04",
    b"Z",
    b"r\xff\xff\xff\x7f",
    b"p2000000000\n",
    "\u2028".encode(),
    b"\r",
    b"x" * 140_000,
    b"(t+)+$",
    b"(?:a|aa)*$",
    b"\x85" * 60,
    b";",
    b"\t",
]


def archive(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, **HOURS)
    return file.getvalue()


def lines(packed: str) -> list[bytes]:
    return [line for _, line in read_lines(Path(packed), 1 << 30, "give text")]


def tokens(path: str) -> list[int]:
    folder = Path(path).parent
    return load_json_tokenizer(folder).encode("a text to be cut, t" + "t" * 300 + "x")


TABLE = "a,city,y,client\n" + "".join(
    f"{i % 5}.5,{'xyz'[i % 3]},{i % 2},c{i % 4}\n" for i in range(24)
)
ROWS = [{"a": i % 5, "city": "xyz"[i % 3], "y": i % 2} for i in range(24)]
SYMBOLS = {letter: i for i, letter in enumerate([*map(chr, range(33, 127)), "\u0120", "te", "ex"])}
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+"
CUT = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": {"Regex": PATTERN}},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ],
}
TOKENIZER = {
    "model": {"type": "BPE", "vocab": SYMBOLS, "merges": ["t e", "e x"]},
    "pre_tokenizer": CUT,
}
#: what may stand in the place of a file
NO_FILES = (
    "/dev/zero",
    "/dev/full",
    "/dev/tty",
    "/proc/self/pagemap",
    "/proc/self/mem",
    "/",
    "/proc/self/fd",
)
SECONDS, MEGABYTES = 20, 1000  # of the processor, that a case may take

#: name -> the file's name, what it holds, who reads it
FILES: dict[str, tuple[str, bytes, Callable[[str], Any]]] = {
    "csv": ("t.csv", b"client,from,to\na,0,10\na,20,30\nb,5,9\n", traces.load_sessions),
    "FLASH": (
        "t.json",
        json.dumps({"a": {"messages": EVENTS}, "b": {"messages": ""}}).encode(),
        traces.load_sessions,
    ),
    "FedScale": ("t.pkl", pickle.dumps({1: TRACE, 2: TRACE}), traces.load_sessions),
    "carbon": (
        "c.csv",
        b"datetime,zone id,carbon_intensity\n2020-01-01 00:00,DE,100\n2020-01-01 01:00,SE,9\n",
        carbon.load_intensities,
    ),
    "carbon npz": ("c.npz", archive(np.savez), carbon.load_intensities),
    "carbon npz, packed": ("c.npz", archive(np.savez_compressed), carbon.load_intensities),
    "table": ("mine.csv", TABLE.encode(), from_path),
    "semicolons": ("mine.csv", TABLE.replace(",", ";").replace(".", ",").encode(), from_path),
    "json lines": (
        "mine.jsonl",
        "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
        from_path,
    ),
    "clients": (
        "c.csv",
        b"client,profile\na,phone\nb*,laptop-cpu\n",
        costs.read_device_assignments,
    ),
    "packed lines": ("t.jsonl.gz", gzip.compress(b'{"text": "one"}\n' * 40), lines),
    "tokenizer": ("tokenizer.json", json.dumps(TOKENIZER).encode(), tokens),
    "profile": (
        "p.toml",
        (Path(costs.__file__).parent / "profiles" / "jetson-nano.toml").read_bytes(),
        costs.load_profile,
    ),
}


def mutated(data: bytes, rng: random.Random) -> bytes:
    """With one to four things done to its bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, action = rng.randrange(len(changed) or 1), rng.random()
        if action < 0.35 and changed:
            changed[at] = rng.randrange(256)
        elif action < 0.55:
            del changed[at : at + rng.randrange(1, 20)]
        elif action < 0.7:
            del changed[at:]
        else:
            word = rng.choice(WORDS)
            changed[at : at + (len(word) if rng.random() < 0.3 else 0)] = word
    return bytes(changed)


def case(folder: Path, name: str, rng: random.Random) -> bool:
    """Whether a mutated file was read; else it was refused in one line."""
    file, data, read = FILES[name]
    path = folder / file
    path.unlink(missing_ok=True)
    place(path, data, rng)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    fine = _reads(path, read)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert time.process_time() - began < SECONDS, path
    assert grown < MEGABYTES, (path, grown)
    return fine


def place(path: Path, data: bytes, rng: random.Random) -> None:
    """A mutated file; now and then something else in its place, or one of terabytes that takes no
    room.
    """
    what = rng.random()
    if what < 0.03:
        path.symlink_to(rng.choice(NO_FILES))
    elif what < 0.05:
        os.mkfifo(path)
    elif what < 0.06:
        path.write_bytes(data)
        os.truncate(path, rng.choice([5 << 30, 1 << 42]))
    else:
        path.write_bytes(mutated(data, rng))


def _reads(path: Path, read: Callable[[str], Any]) -> bool:
    traces.load_sessions.cache_clear()
    carbon.load_intensities.cache_clear()
    try:
        read(str(path))
    except BadInput as why:
        assert "\n" not in str(why)  # noqa: PT017
        return False
    return True
