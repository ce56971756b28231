"""Going on in a state folder, the closing summary, and versions of Flower other than the installed
one.
"""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flrce[flower]")

from flwr.app import Array, MetricRecord
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flower_helpers import plain_app, start
from flrce.errors import BadInput
from flrce.flower import FLrce, Guarded, RecipeStrategy
from flrce.flower.grid import LocalGrid
from flrce.methods.catalogue.standard import fedavg

MAKERS = {
    "flrce": lambda folder: FLrce(state=folder, wait_for_nodes=5.0),
    "guarded": lambda folder: Guarded(
        FedAvg(min_available_nodes=3), state=folder, wait_for_nodes=5.0
    ),
}


def judge(t, arrays):
    return MetricRecord({"seen": float(arrays["layer.bias"].numpy().sum())})


@pytest.fixture(params=sorted(MAKERS))
def make(request):
    return MAKERS[request.param]


def run(make, folder, rounds, arrays=None):
    return make(folder).start(
        LocalGrid(plain_app(), 3), arrays or start(), rounds, evaluate_fn=judge
    )


def test_a_finished_run_goes_on_with_more_rounds_and_all_its_metrics(make, tmp_path):
    run(make, tmp_path / "a", 2)
    longer, straight = run(make, tmp_path / "a", 4), run(make, tmp_path / "b", 4)
    assert {n: a.data for n, a in longer.arrays.items()} == {
        n: a.data for n, a in straight.arrays.items()
    }
    for name in (
        "train_metrics_clientapp",
        "evaluate_metrics_clientapp",
        "evaluate_metrics_serverapp",
    ):
        mine, other = getattr(longer, name), getattr(straight, name)
        assert mine.keys() == other.keys()
        for t in mine:
            assert {k: v for k, v in mine[t].items() if k != "seconds"} == {
                k: v for k, v in other[t].items() if k != "seconds"
            }


def changed(**arrays):
    made = start()
    for name, value in arrays.items():
        made[name.replace("_", ".")] = Array(value)
    return made


@pytest.mark.parametrize(
    "arrays",
    [
        changed(layer_bias=np.zeros(4, np.float32)),
        changed(layer_bias=np.zeros(3)),
        changed(more=np.zeros(2, np.float32)),
    ],
    ids=["shape", "dtype", "names"],
)
def test_another_model_is_called_one(make, tmp_path, arrays):
    run(make, tmp_path, 1)
    with pytest.raises(
        BadInput, match=r"holds another model: .* pass the same model, or another state folder"
    ):
        run(make, tmp_path, 2, arrays)


def test_refusals_speak_of_strategies_not_of_the_command_line(make, tmp_path):
    run(make, tmp_path, 3)
    with pytest.raises(BadInput, match=r"num_rounds = 2: .* or use another state folder") as few:
        run(make, tmp_path, 2)
    with pytest.raises(BadInput, match="differs") as other:
        FLrce(state=tmp_path, seed=5, psi=1.0).start(LocalGrid(plain_app(), 3), start(), 4)
    for found in (few, other):
        assert "--" not in str(found.value)


def test_one_closing_summary(tmp_path, caplog):
    with caplog.at_level("INFO", logger="flwr"):
        FLrce(budget={"rounds": 2}, state=tmp_path, wait_for_nodes=5.0).start(
            LocalGrid(plain_app(), 3), start(), 9
        )
    assert caplog.text.count("2 of 9 rounds in") == 1
    last = caplog.text[caplog.text.index("2 of 9 rounds in") :]
    assert "budget of 2 rounds" in last
    assert "accuracy 0." in last
    assert "replies did not count" in last
    assert f"flrce report {tmp_path}" in last
    assert "ERROR" not in caplog.text


def test_flowers_own_privacy_wrapper_is_guarded():
    """Clipping and noise of the server, around FedAvg, behind our gate."""

    def private():
        inner = FedAvg(min_available_nodes=3, min_train_nodes=3, fraction_evaluate=0.0)
        return DifferentialPrivacyServerSideFixedClipping(
            inner, 0.5, clipping_norm=0.1, num_sampled_clients=3
        )

    result = Guarded(private(), wait_for_nodes=5.0).start(LocalGrid(plain_app(), 3), floats(), 2)
    assert [len(record.replied) for record in result.history] == [3, 3]
    moved = np.abs(result.arrays["layer.weight"].numpy())
    assert 0 < moved.max() < 0.5  # two steps clipped to 0.1, and their noise; 0.5 without


def floats():
    arrays = start()
    arrays.pop("norm.num_batches_tracked")
    return arrays


OTHERS = [path for path in os.environ.get("FLRCE_FLOWERS", "").split(os.pathsep) if path]


@pytest.mark.parametrize(
    "folder", OTHERS or [pytest.param("", marks=pytest.mark.skip("set FLRCE_FLOWERS"))]
)
def test_other_versions_of_flower(folder):
    """FLRCE_FLOWERS names folders of `pip install --no-deps --target FOLDER flwr==VERSION`: 1.38.0,
    1.42.0.
    """
    here = Path(__file__).parent
    path = os.pathsep.join([folder, *sys.path])
    tests = [
        str(here / f"test_{name}.py")
        for name in ("flower_users", "stopping", "nodes", "guarded", "arrays")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests],
        env={**os.environ, "PYTHONPATH": path, "FLRCE_FLOWERS": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_without_flowers_private_parts_only_the_local_grid_is_missing():
    code = (
        "import sys, flwr.clientapp, flwr.serverapp.strategy;"
        " sys.modules['flwr.supercore.task_identity'] = None\nfrom flrce.flower import FLrce,"
        " Guarded, RecipeStrategy, client_app, introduce, should_stop\nfrom flrce.errors import"
        " BadInput\ntry:\n    from flrce.flower import LocalGrid\nexcept BadInput as why:\n   "
        " print('SAID', why)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "SAID LocalGrid needs parts of Flower that are private" in done.stdout, (
        done.stdout + done.stderr
    )


def test_a_folder_tells_a_private_run_from_others(tmp_path):
    """Both flags of a recipe decide what the server may look at: going on without one is another
    run.
    """
    private = replace(fedavg(P=3), sums=True)
    common = {"state": tmp_path, "wait_for_nodes": 5.0}
    RecipeStrategy(private, **common).start(LocalGrid(plain_app(), 3), start(), 1)
    assert tomllib.loads((tmp_path / "experiment.toml").read_text())["recipe"]["sums"] is True
    with pytest.raises(BadInput, match="differs"):
        RecipeStrategy(replace(private, sums=False), **common).start(
            LocalGrid(plain_app(), 3), start(), 2
        )
    RecipeStrategy(private, **common).start(LocalGrid(plain_app(), 3), start(), 2)
