"""Fleets with trouble: what each kind does, worked out in plain loops; that runs resume; that bad
values are named.
"""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flrce import Experiment
from flrce.data.federation import federate
from flrce.data.sources import Source, load_source
from flrce.data.trouble import Drift, FreeRiders, NoisyInputs, RareClasses, SlowLabels, WrongLabels
from flrce.errors import BadInput
from flrce.simulation import runs
from flrce.training.free_riders import PREVIOUS_MODEL_KEY

DIGITS = load_source("digits", None)


def fleet(*trouble, seed=0, M=20, scheme="dirichlet", alpha=0.5):
    return federate(DIGITS, scheme, M, seed, alpha, trouble=trouble)


@given(
    st.integers(0, 99),
    st.sampled_from(["symmetric", "pairwise"]),
    st.sampled_from([0.25, 0.4, 1.0]),
)
@settings(max_examples=10)
def test_wrong_labels_are_where_they_should_be(seed, how, wrong):
    made = fleet(WrongLabels(0.2, wrong, how), seed=seed)
    bad = made.trouble.who["wrong-labels"]
    assert len(bad) == 4
    for k, client in enumerate(made.clients):
        own = made.train[k]
        changed = made.source.y[own] != DIGITS.y[own]
        assert changed.sum() == (round(wrong * len(own)) if client in bad else 0)
        if how == "pairwise":
            assert (made.source.y[own][changed] == (DIGITS.y[own][changed] + 1) % 10).all()
        assert (
            made.source.y[made.held[k]] == DIGITS.y[made.held[k]]
        ).all()  # judged by what is true


@pytest.mark.parametrize("kind", ["values", "labels", "tokens"])
def test_wrong_values_sets_of_labels_and_symbols(kind):
    rng = np.random.default_rng(0)
    y = {
        "values": np.arange(80, dtype=np.float32),
        "labels": rng.integers(0, 2, (80, 6)),
        "tokens": rng.integers(0, 7, (80, 5)),
    }[kind]
    if kind == "tokens":
        y[::2, 3:] = -100  # positions that do not count
    names = () if kind == "values" else tuple("abcdefg")[: 6 if kind == "labels" else 7]
    made = federate(
        Source("s", np.zeros((80, 3), np.float32), y, names, kind=kind),
        "iid",
        8,
        0,
        trouble=[WrongLabels(0.25, 0.5)],
    )
    bad = made.trouble.who["wrong-labels"]
    assert len(bad) == 2
    for k, client in enumerate(made.clients):
        own = made.train[k]
        changed = (made.source.y[own] != y[own]).reshape(len(own), -1)
        assert changed.any() == (client in bad)
        assert changed.any(1).sum() <= round(0.5 * len(own))  # drawn, values may be the same again
        if kind == "tokens":  # every symbol of a wrong sample that counts, and no other position
            assert (changed.any(1)[:, None] * (y[own] >= 0) == changed).all()
        assert (made.source.y[made.held[k]] == y[made.held[k]]).all()
    assert np.isin(made.source.y, y).all()


def test_noisy_inputs_touch_some_clients_only():
    made = fleet(NoisyInputs(0.2, 1.0))
    for k, client in enumerate(made.clients):
        away = made.source.x[made.train[k]].astype(float) - DIGITS.x[made.train[k]]
        assert (np.abs(away).max() > 0) == (client in made.trouble.who["noisy-inputs"])
    tokens = Source("t", np.arange(4000).reshape(400, 10) % 7, np.arange(400) % 2, ("a", "b"))
    noisy = federate(tokens, "iid", 4, 0, trouble=[NoisyInputs(1.0, 0.5)])
    own = np.concatenate(noisy.train)
    assert (
        0.3 < (noisy.source.x[own] != tokens.x[own]).mean() < 0.5
    )  # half, of which a seventh hits the same id


@given(st.integers(0, 99), st.sampled_from(["dirichlet", "quantity", "iid"]))
@settings(max_examples=15)
def test_rare_classes_are_with_few(seed, scheme):
    made, fine = (
        fleet(RareClasses(0.15, 2), seed=seed, scheme=scheme),
        fleet(seed=seed, scheme=scheme),
    )
    holders = made.trouble.who["rare-classes"]
    everyone = np.concatenate([*made.train, *made.held])
    assert len(np.unique(everyone)) == len(everyone)  # nobody shares a sample
    assert set(everyone) <= set(np.concatenate([*fine.train, *fine.held]))
    others = [
        part for client, part in zip(made.clients, made.held, strict=True) if client not in holders
    ]
    elsewhere = [set(DIGITS.y[part].tolist()) for part in others]
    assert len(set().union(*elsewhere)) == 8  # hold-outs: two classes are with the holders alone
    assert min(map(len, made.train)) >= 2


def test_drift_goes_round():
    made = fleet(Drift(1.0, 0.5, 4))
    own, seen = made.train[0], [made.get_client_samples("0", t) for t in range(1, 5)]
    assert {len(part) for part in seen} == {round(0.5 * len(own))}
    assert set(np.concatenate(seen)) == set(own)
    assert made.get_client_samples("0", 5).tolist() == seen[0].tolist()
    assert made.n[0] == len(seen[0])


def test_slow_devices_have_other_labels():
    made = fleet(SlowLabels(0.3, "raspberry-pi-4"))
    upper = [np.mean(DIGITS.y[part] >= 5) for part in made.train]
    slow = [client in made.trouble.slow for client in made.clients]
    assert sum(slow) == 6
    assert min(u for u, s in zip(upper, slow, strict=True) if s) >= max(
        u for u, s in zip(upper, slow, strict=True) if not s
    )


def experiment(*trouble, **tables):
    return Experiment(
        rounds=4,
        clients=8,
        per_round=4,
        data={"partition": "iid", "trouble": list(trouble)},
        model={"name": "mlp"},
        recipe={"name": "fedavg"},
        engine={"workers": 1},
        **tables,
    )


@pytest.mark.parametrize("sends", ["zero", "noise", "stale"])
def test_free_riders_send_what_they_say(sends):
    exp = experiment({"piece": "free-riders", "share": 1.0, "sends": sends})
    built, seen = runs.build_simulation(exp), []
    for done in built.iterate_rounds(exp):
        seen.append(done.state)
    built.engine.close()
    moved = [float((b.w - a.w).norm()) for a, b in itertools.pairwise(seen)]
    assert all(m == 0 for m in moved) == (
        sends != "noise"
    )  # where all ride, there is no way to copy
    assert all(PREVIOUS_MODEL_KEY in carried for carried in seen[-1].client_states.values())


def test_a_stale_free_rider_sends_the_models_way():
    """Its second update is the way of the model between the two times that it was asked."""
    exp = experiment({"piece": "free-riders", "share": 0.25, "sends": "stale"}).model_copy(
        update={"per_round": 8}
    )
    built, states, updates = runs.build_simulation(exp), [], []
    rider = built.federation.trouble.who["free-riders"][0]
    train = built.engine.train
    built.engine.train = lambda *args: updates.append(train(*args)) or updates[-1]
    for done in built.iterate_rounds(exp):
        states.append(done.state.w.clone())
    built.engine.close()
    sent = {reply.client: reply.payload.buffers["u"] for reply in updates[2]}[rider]
    torch.testing.assert_close(sent, states[1] - states[0])


@pytest.mark.parametrize(
    "trouble",
    [
        {"piece": "drift", "period": 3},
        {"piece": "free-riders", "share": 0.5},
        {"piece": "wrong-labels", "share": 0.5},
    ],
    ids=lambda table: table["piece"],
)
def test_a_killed_run_goes_on_in_the_same_trouble(trouble, tmp_path):
    exp = experiment(trouble)
    straight = runs.run(exp, tmp_path / "straight")

    def die(done):
        if done.record.t == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run(exp, tmp_path / "killed", watch=die)
    resumed = runs.run(exp, tmp_path / "killed", resume=True)
    for name, tensor in straight.model.items():
        assert torch.equal(tensor, resumed.model[name])
    told = json.loads((tmp_path / "killed" / "partition.json").read_text())["trouble"]
    assert told == {
        trouble["piece"]: list(runs.build_simulation(exp).federation.trouble.who[trouble["piece"]])
    }


@pytest.mark.parametrize(
    ("trouble", "match"),
    [
        ({"piece": "wrong-label"}, "did you mean 'wrong-labels'"),
        ({"piece": "wrong-labels", "share": 1.5}, "share"),
        ({"piece": "wrong-labels", "how": "sideways"}, "how"),
        ({"piece": "slow-labels", "profile": "abacus"}, "abacus"),
        ({"share": 0.1}, "give a name"),
    ],
)
def test_bad_trouble_is_one_line(trouble, match):
    with pytest.raises(BadInput, match=match) as why:
        experiment(trouble)
    assert "\n" not in str(why.value)


def test_trouble_that_does_not_fit_the_data_is_refused():
    values = Source("v", np.zeros((40, 3), np.float32), np.zeros(40, np.float32), (), kind="values")
    with pytest.raises(BadInput, match="values have no next one"):
        federate(values, "iid", 4, 0, trouble=[WrongLabels(how="pairwise")])
    with pytest.raises(BadInput, match="rare-classes is about classes"):
        federate(values, "iid", 4, 0, trouble=[RareClasses()])
    alike = Source("a", np.zeros((40, 3), np.float32), np.zeros(40, np.int64), ("one",))
    with pytest.raises(
        BadInput, match="slow-labels is about classes, a has a single class; drop it"
    ):
        federate(alike, "iid", 4, 0, trouble=[SlowLabels()])
    with pytest.raises(BadInput, match="cannot be rare"):
        fleet(RareClasses(0.1, 10))
    with pytest.raises(BadInput, match="simulator"):
        runs.run(
            experiment("drift").model_copy(
                update={"engine": Experiment(engine={"name": "flower"}).engine}
            )
        )


@pytest.mark.parametrize("name", ["nokia", "nokia.toml"])
def test_an_unknown_profile_is_named_where_it_stands(name):
    with pytest.raises(
        BadInput, match=f"data.trouble slow-labels: profile '{name}' (is unknown|cannot be read)"
    ):
        experiment({"piece": "slow-labels", "profile": name})


def test_kinds_have_clients_of_their_own():
    made = fleet(WrongLabels(0.2), FreeRiders(0.2), RareClasses(0.1))
    who = made.trouble.who
    assert [len(clients) for clients in who.values()] == [4, 4, 2]
    assert len(set().union(*who.values())) == 10
