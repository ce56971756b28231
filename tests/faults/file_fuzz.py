"""Files of traces, carbon intensities and profiles as users have them, and what may become of them."""

import io
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flrce.errors import BadInput
from flrce.fleet import carbon, costs, traces

EVENTS = "2020-01-31 10:00:00\tbattery_charged_on\n2020-01-31 11:00:00\twifi\n2020-01-31 12:00:00\tbattery_charged_off"
TRACE = {"active": [0, 100], "inactive": [50, 200], "finish_time": 300}
HOURS = {"DE": np.arange(48.0), "DE_start": "2020-01-01T00:00"}
WORDS = [
    b"[" * 3000, b"9" * 5000, b"\n", b"{", b"\xff", b"NaN", b"1e999", b"null", b",", b"-1", b"0001-01-01", b"inf", b'"',
    b"9999-12-31 23:59:59+00:00", b"\x00" * 8, b"1e308", b"\xff\xff\xff\x7f", b"\x80\x04", b"Z",
]  # fmt: skip


def archive(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, **HOURS)
    return file.getvalue()


#: name -> the file's name, what it holds, who reads it
FILES: dict[str, tuple[str, bytes, Callable[[str], Any]]] = {
    "csv": ("t.csv", b"client,from,to\na,0,10\na,20,30\nb,5,9\n", traces.sessions),
    "FLASH": ("t.json", json.dumps({"a": {"messages": EVENTS}, "b": {"messages": ""}}).encode(), traces.sessions),
    "FedScale": ("t.pkl", pickle.dumps({1: TRACE, 2: TRACE}), traces.sessions),
    "carbon": ("c.csv", b"datetime,zone id,carbon_intensity\n2020-01-01 00:00,DE,100\n2020-01-01 01:00,SE,9\n",
               carbon.intensities),
    "carbon npz": ("c.npz", archive(np.savez), carbon.intensities),
    "carbon npz, packed": ("c.npz", archive(np.savez_compressed), carbon.intensities),
    "profile": ("p.toml", (Path(costs.__file__).parent / "profiles" / "jetson-nano.toml").read_bytes(), costs.profile),
}  # fmt: skip


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
    path.write_bytes(mutated(data, rng))
    traces.sessions.cache_clear()
    carbon.intensities.cache_clear()
    try:
        read(str(path))
    except BadInput as why:
        assert "\n" not in str(why)  # noqa: PT017
        return False
    return True
