"""An explicit device is a requirement: without a GPU `cuda` ends in one line, and nothing is
made.
"""

from pathlib import Path

import pytest
import torch

import flrce
from flrce.cli.cli import main
from flrce.errors import BadInput
from flrce.simulation import runs
from flrce.simulation.build import choose_device

Capture = pytest.CaptureFixture[str]
SMALL = {"rounds": 2, "clients": 10, "per_round": 2}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def command(*words: str) -> list[str]:
    return [*words, *(f"--set={key}={value}" for key, value in SMALL.items())]


@pytest.mark.parametrize("engine", [{"device": "cuda"}, {"device": "cuda", "name": "flower"}])
def test_python_refuses_a_gpu_that_is_not_there(engine: dict[str, str]) -> None:
    asked = flrce.Experiment(engine=engine, **SMALL)
    with pytest.raises(BadInput, match=r"engine.device = 'cuda'.*'auto'"):
        flrce.run(asked)
    with pytest.raises(BadInput, match="engine"):
        next(flrce.rounds(asked))


def test_a_stack_refuses_a_gpu_that_is_not_there() -> None:
    with pytest.raises(BadInput, match="no GPU"):
        runs.run_together([(flrce.Experiment(**SMALL), None)])


@pytest.mark.parametrize("words", [("run",), ("compare", "--recipes=fedavg", "--out=c")])
def test_commands_refuse_a_gpu_that_is_not_there(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    for device in ("--device=cuda", "--set=engine.device=cuda"):
        assert main([*command(*words), device]) == 2
        told = capsys.readouterr()
        assert "no GPU" in told.err
        assert (told.out + told.err).count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["cuda:3", "mps", "gpu", "CUDA", ""])
def test_unknown_devices_are_named(device: str, tmp_path: Path, capsys: Capture) -> None:
    assert main([*command("run"), f"--out={tmp_path / 'a'}", f"--device={device}"]) == 2
    assert f"engine.device = {device!r}" in capsys.readouterr().err


def test_auto_chooses_and_a_run_goes_on_elsewhere_by_another_device(
    tmp_path: Path, capsys: Capture
) -> None:
    assert choose_device(flrce.Experiment(**SMALL)) == "cpu"
    flrce.run(flrce.Experiment(**SMALL), tmp_path)
    file = tmp_path / "experiment.toml"
    file.write_text(file.read_text().replace('device = "auto"', 'device = "cuda"'))
    longer = ["run", f"--out={tmp_path}", "--resume", "--set=rounds=3"]
    assert main(longer) == 2
    assert "--device auto" in capsys.readouterr().err
    assert main([*longer, "--device=auto"]) == 0
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 3
