"""Row 33, files beside an experiment: traces, carbon intensities and profiles that somebody else
wrote.
"""

import io
import pickle
import random

import numpy as np
import pytest
from file_fuzz import FILES, case

from flrce.devices import carbon, traces
from flrce.errors import BadInput

row33 = pytest.mark.row(
    33, "traces, carbon intensities, profiles by a stranger", "read, or HALT in one line"
)


@row33
@pytest.mark.parametrize("name", FILES)
def test_mutated_files(name, tmp_path, seen):
    file, data, read = FILES[name]
    (tmp_path / file).write_bytes(data)
    assert read(str(tmp_path / file))  # as it was
    fine = [case(tmp_path, name, random.Random(f"{name} {seed}")) for seed in range(300)]
    seen(f"{name}: {fine.count(False)} of 300 refused")


@row33
@pytest.mark.parametrize(
    ("told", "content"),
    [
        ("cannot be read", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff}."),
        ("names os.system", b"\x80\x02cos\nsystem\nq\x00X\x02\x00\x00\x00idq\x01\x85q\x02Rq\x03."),
        ("holds no clients", pickle.dumps({})),
    ],
)
def test_hostile_pickles_of_traces(told, content, tmp_path):
    path = tmp_path / "t.pkl"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=told):
        traces.load_sessions(str(path))


@row33
@pytest.mark.parametrize(
    "line", ["2020-01-01 00:00", "2020-01-01 00:00,DE", "x,DE,1", "2020-01-01 00:00,DE,1e9"]
)
def test_short_rows_of_intensities(line, tmp_path):
    path = tmp_path / "c.csv"
    path.write_text(f"datetime,zone id,carbon_intensity\n{line}\n")
    with pytest.raises(BadInput, match="line 2"):
        carbon.load_intensities(str(path))
    path.write_text("carbon_intensity,datetime,zone id\n1,2020-01-01 00:00\n")
    carbon.load_intensities.cache_clear()
    with pytest.raises(BadInput, match="line 2 has no region"):
        carbon.load_intensities(str(path))


@row33
@pytest.mark.parametrize("how", ["empty", "no zip", "bad CRC", "a bomb", "objects"])
def test_hostile_archives_of_intensities(how, tmp_path):
    """They go through the reader of strangers' .npz: weighed before anything is unpacked."""
    path, file = tmp_path / "c.npz", io.BytesIO()
    if how == "a bomb":
        np.savez_compressed(file, DE=np.zeros(2**26), DE_start="2020-01-01")
    else:
        values = np.array([{}], object) if how == "objects" else np.ones(9)
        np.savez(file, DE=values, DE_start="2020-01-01")
    data = bytearray({"empty": b"", "no zip": b"PK"}.get(how, file.getvalue()))
    if how == "bad CRC":
        data[200] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(BadInput, match=r"fleet\.carbon .*c\.npz"):
        carbon.load_intensities(str(path))
