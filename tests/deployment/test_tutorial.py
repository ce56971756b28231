"""The tutorial's federation as it is written: its files, its commands, with ports and folders of
the test's own.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from fleet import BIN, ROOT, free_port, rounds

PAGE = ROOT / "docs" / "tutorial-flower.md"
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)


def test_the_tutorial_on_real_nodes(tmp_path):
    blocks = FENCE.findall(PAGE.read_text())
    text = "\n".join(body for kind, body in blocks if kind == "sh")
    ports = {
        port: str(free_port()) for port in sorted(set(re.findall(r"\b(?:8000|91\d\d)\b", text)))
    }
    assert len(ports) == 5  # a server and four devices

    def here(written: str) -> str:
        for port, own in ports.items():
            written = re.sub(rf"\b{port}\b", own, written)
        return written.replace("/tmp/digits-run", str(tmp_path / "run")).replace(
            "num_rounds=20", "num_rounds=3"
        )

    app, home = tmp_path / "app", tmp_path / "home"
    app.mkdir()
    home.mkdir()
    for _, body in blocks:
        found = re.match(r"# ([\w.-]+\.\w+)\n", body)
        if found:
            (home if found[1] == "config.toml" else app).joinpath(found[1]).write_text(here(body))
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "NO_COLOR": "1",
    }
    started, told = [], {}
    try:
        for line in here(text).splitlines():
            if not line or line.startswith("export"):
                continue
            if line.endswith("&"):
                with open(tmp_path / f"{len(started)}.log", "wb") as log:
                    started.append(
                        subprocess.Popen(
                            line[:-1],
                            shell=True,
                            cwd=app,
                            env=environment,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
                continue
            if line.startswith("flwr list"):
                done(tmp_path)
            command = re.sub(r"^flrce ", f"{sys.executable} -m flrce.cli.cli ", line)
            if line.startswith("flrce watch"):
                until(
                    lambda: (tmp_path / "run" / "rounds.jsonl").exists(), tmp_path
                )  # a terminal would wait there
                command += " --once"
            ran = subprocess.run(
                command,
                shell=True,
                cwd=app,
                env=environment,
                capture_output=True,
                text=True,
                timeout=180,
            )
            assert ran.returncode == 0, f"{line}: {ran.stdout}{ran.stderr}"
            told[line.split()[1]] = ran.stdout
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    records = rounds(tmp_path / "run")
    assert [r["t"] for r in records] == [1, 2, 3]
    assert all(len(r["replied"]) == 2 for r in records)
    assert records[-1]["accuracy"] > 0.2
    assert "3 rounds" in told["why"]
    assert (app / "report.html").stat().st_size > 10_000


def done(folder: Path) -> None:
    until(lambda: (folder / "run" / "summary.json").exists(), folder)


def until(true, folder: Path, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not true():
        logs = "\n".join(
            path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("*.log"))
        )
        assert time.monotonic() < end, logs
        time.sleep(0.5)
