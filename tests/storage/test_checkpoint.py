"""State on disk and back: every kind of memory, cost per round, compaction, and the schema before
this one.
"""

import hashlib
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from flrce.core.types import Round, RoundRecord, State
from flrce.errors import BadInput
from flrce.storage.checkpoint import Journal, read_manifests
from flrce.storage.ledger import Ledger
from flrce.storage.ledger_lines import replace_non_finite


@dataclass(frozen=True)
class Memory:
    """One field of every kind."""

    V: torch.Tensor = field(metadata={"rows": True})
    R: torch.Tensor = field(metadata={"rows": True})
    Omega: torch.Tensor = field(metadata={"rows": True, "square": True})
    total: torch.Tensor
    past: dict[int, torch.Tensor] = field(default_factory=dict)
    weight: float = 0.0
    names: tuple[str, ...] = ()
    limit: float | None = None


def start(M, d):
    memory = Memory(torch.zeros(M, d), torch.full((M,), -9), torch.zeros(M, M), torch.zeros(2))
    return State(0, torch.zeros(d), {"selector": memory}, tuple(f"c{k}" for k in range(M)))


def step(state, touched, t, grow=0):
    """A round that changes exactly what a round may change."""
    m, M = state.server_state["selector"], len(state.roster) + grow
    d = m.V.shape[1]
    V, R, Omega = torch.zeros(M, d), torch.full((M,), -9), torch.zeros(M, M)
    V[: len(m.R)], R[: len(m.R)], Omega[: len(m.R), : len(m.R)] = m.V, m.R, m.Omega
    for k in touched:
        V[k], R[k], Omega[k] = t + k / 10, t, (t * k) % 7
    past = {**m.past, t: torch.full((d,), float(t))}
    past.pop(t - 3, None)
    memory = Memory(
        V,
        R,
        Omega,
        m.total + t,
        past,
        m.weight + 0.1,
        (*m.names, str(t))[-3:],
        t / 3 if t % 2 else None,
    )
    roster = state.roster + tuple(f"new{t}-{i}" for i in range(grow))
    carry = {
        **state.client_states,
        **{roster[k]: {"residual": torch.full((d,), t + k / 7)} for k in touched},
    }
    after = State(
        t, state.w + t, {"selector": memory}, roster, carry, (*state.history, RoundRecord(t))
    )
    return Round(after, RoundRecord(t), (), tuple(touched))


def alike(a, b):
    assert (a.t, a.attempt, a.roster) == (b.t, b.attempt, b.roster)
    assert torch.equal(a.w, b.w)
    one, other = a.server_state["selector"], b.server_state["selector"]
    for name in ("V", "R", "Omega", "total"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert (one.weight, one.names, one.limit) == (other.weight, other.names, other.limit)
    assert list(one.past) == list(other.past)  # the order too: the tail mean drops the first
    assert all(torch.equal(one.past[r], other.past[r]) for r in one.past)
    assert a.client_states.keys() == b.client_states.keys()
    assert all(
        torch.equal(a.client_states[c]["residual"], b.client_states[c]["residual"])
        for c in a.client_states
    )


def journal(folder):
    return Journal(folder, "same", {"flrce": "1"})


def restored(folder, M, d):
    return journal(folder).restore(start(M, d), lambda marks: None)


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 6), max_size=4), st.sampled_from([0, 0, 0, 1])),
        min_size=1,
        max_size=9,
    )
)
def test_saved_and_restored(tmp_path_factory, history):
    folder, state = tmp_path_factory.mktemp("checkpoint"), start(7, 3)
    kept = journal(folder)
    for t, (touched, grow) in enumerate(history, start=1):
        done = step(state, sorted(touched), t, grow)
        kept.save(done, {}, lambda: None)
        state = done.state
        alike(restored(folder, 7, 3), state)
    again = journal(folder)  # a resumed journal goes on as the first one would have
    alike(again.restore(start(7, 3), lambda marks: None), state)
    assert again.places.owner == kept.places.owner
    assert again.places.live == kept.places.live
    done = step(state, [1, 2], len(history) + 1)
    again.save(done, {}, lambda: None)
    alike(restored(folder, 7, 3), done.state)


def test_an_abandoned_round_is_kept_too(tmp_path):
    first = step(start(4, 3), [1], 1)
    kept = journal(tmp_path)
    kept.save(first, {}, lambda: None)
    tried = replace(
        first.state, attempt=2, history=(*first.state.history, RoundRecord(2, "abandoned"))
    )
    kept.save(Round(tried, RoundRecord(2, "abandoned"), ()), {}, lambda: None)
    alike(restored(tmp_path, 4, 3), tried)


def test_disk_use_stays_within_twice_the_tables(tmp_path):
    """One client in each round is never asked again, the worst case for files of rows: without
    compaction all stay.
    """
    M, P, d, state = 60, 6, 500, start(60, 500)
    kept, largest = journal(tmp_path), 0
    for t in range(1, 121):
        touched = [t % 50, *range(50, 50 + P - 1)]
        done = step(state, touched, t)
        kept.save(done, {}, lambda: None)
        state = done.state
        largest = max(largest, sum(p.stat().st_size for p in tmp_path.glob("*.rows")))
    row = 4 * (2 * d + M) + 8
    alike(restored(tmp_path, M, d), state)
    assert largest < 2.6 * M * row
    assert sum(kept.places.live.values()) == 55


def written(M, P, d, tmp_path):
    """(bytes, seconds) of a late round."""
    state, kept = start(M, d), journal(tmp_path / f"{M}")
    for t in range(1, 6):
        touched = [(7 * t + i) % M for i in range(P)]
        done = step(state, touched, t)
        began = time.perf_counter()
        kept.save(done, {}, lambda: None)
        seconds = time.perf_counter() - began
        state = done.state
    path, commit, _ = read_manifests(tmp_path / f"{M}")[0][0]
    new = sum(e["bytes"] for name, e in commit.files.items() if name.startswith(commit.latest))
    return new + path.stat().st_size, seconds


def test_a_round_costs_its_own_clients_not_everybody(tmp_path):
    """A hundred times the clients: the same V rows; only Omega's rows (P x M) and nothing of size M
    x d grow.
    """
    few, _ = written(20, 4, 2000, tmp_path)
    many, _ = written(2000, 4, 2000, tmp_path)
    assert few < 4 * (4 * 2 * 2000 + 3 * 2000) * 1.3 + 20_000
    assert many - few < 4 * 4 * 2000 * 1.2
    assert many < 0.02 * 4 * 2000 * 2000


def test_guard_is_asked_before_the_commit(tmp_path):
    kept = journal(tmp_path)
    done = step(start(4, 3), [1], 1)

    def refuse():
        raise BadInput("not yours")

    with pytest.raises(BadInput):
        kept.save(done, {}, refuse)
    assert read_manifests(tmp_path) == ([], [])
    assert restored(tmp_path, 4, 3) is None


def first_schema(folder: Path, experiment: str) -> State:
    """A checkpoint as version 1 wrote it, made by hand: two rounds, three clients, rows 0 and 2
    heard from.
    """
    folder.mkdir(parents=True)
    rows1 = {
        "selector.V": torch.tensor([[1.0, 2.0], [5.0, 6.0]]),
        "selector.R": torch.tensor([1, 1]),
        "selector.Omega": torch.ones(2, 3),
        "k": torch.tensor([0, 2]),
    }
    rows2 = {
        "selector.V": torch.tensor([[3.0, 4.0]]),
        "selector.R": torch.tensor([2]),
        "selector.Omega": torch.full((1, 3), 2.0),
        "k": torch.tensor([2]),
        "selector.past/2": torch.ones(2),
        "carry/2/residual": torch.full((2,), 0.5),
    }
    whole = {"w": torch.tensor([7.0, 8.0]), "selector.total": torch.tensor([3.0, 3.0])}
    files = {}
    for name, tensors in {
        "000001.rows": rows1,
        "000002.rows": rows2,
        "000002.state": whole,
    }.items():
        data = save(tensors)
        (folder / name).write_bytes(data)
        files[name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (folder / "manifest.json").write_text(
        json.dumps(
            {
                "t": 2,
                "attempt": 0,
                "roster": ["c0", "c1", "c2"],
                "files": files,
                "latest": "000002",
                "rows": {"0": "000001.rows", "2": "000002.rows"},
                "rounds": {"selector.past/2": "000002.rows"},
                "scalars": {
                    "selector.weight": 0.2,
                    "selector.names": ["1", "2"],
                    "selector.limit": None,
                },
                "ledger": {"rounds.jsonl": 0},
                "experiment": experiment,
                "schema": 1,
            }
        )
    )
    memory = Memory(torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]), torch.tensor([1, -9, 2]),
                    torch.tensor([[1.0] * 3, [0.0] * 3, [2.0] * 3]), torch.tensor([3.0, 3.0]), {2: torch.ones(2)},
                    0.2, ("1", "2"))  # fmt: skip
    carry = {"c2": {"residual": torch.full((2,), 0.5)}}
    return State(2, torch.tensor([7.0, 8.0]), {"selector": memory}, ("c0", "c1", "c2"), carry)


def test_the_first_schema_is_migrated(tmp_path):
    wanted = first_schema(tmp_path / "checkpoint", "same")
    kept = journal(tmp_path / "checkpoint")
    found = kept.restore(start(3, 2), lambda marks: None)
    alike(found, wanted)
    done = step(replace(found, history=(RoundRecord(1), RoundRecord(2))), [1], 3)
    kept.save(done, {}, lambda: None)
    alike(restored(tmp_path / "checkpoint", 3, 2), done.state)
    assert [commit.t for _, commit, _ in read_manifests(tmp_path / "checkpoint")[0]] == [3, 2]
    assert (
        json.loads((tmp_path / "checkpoint" / "manifest.a.json").read_text())["commit"]["schema"]
        == 3
    )
    (tmp_path / "checkpoint" / "000003.state").unlink()  # its spare is the old manifest as it was
    alike(restored(tmp_path / "checkpoint", 3, 2), wanted)


def test_the_schema_before_is_gone_on_with(tmp_path):
    """It has the rows of the round's clients alone, and lists where there were tuples; the next
    commit has all.
    """
    folder = tmp_path / "checkpoint"
    wanted = first_schema(folder, "same")
    old = json.loads((folder / "manifest.json").read_text())
    data = json.dumps(old.pop("roster")).encode()
    (folder / "000002.roster").write_bytes(data)
    old["files"]["000002.roster"] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    body = {name: value for name, value in old.items() if name != "rows"}
    body |= {"schema": 2, "roster": "000002.roster", "versions": {}, "ledger": {}}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    seal = {"sha256": hashlib.sha256(text).hexdigest(), "commit": body}
    (folder / "manifest.json").unlink()
    (folder / "manifest.a.json").write_text(json.dumps(seal))
    kept = journal(folder)
    found = kept.restore(start(3, 2), lambda marks: None)
    alike(found, wanted)
    for t in (3, 4):
        done = step(replace(found, history=tuple(map(RoundRecord, range(1, t)))), [1], t)
        kept.save(done, {}, lambda: None)
        found = restored(folder, 3, 2)
        alike(found, done.state)


def test_another_experiment_is_refused(tmp_path):
    first_schema(tmp_path / "checkpoint", "other")
    with pytest.raises(BadInput, match="another experiment"):
        restored(tmp_path / "checkpoint", 3, 2)


def test_a_recipe_of_other_pieces_is_not_damage(tmp_path):
    """A preset that a later version makes of other pieces: the line names the table that is not
    there.
    """
    journal(tmp_path).save(step(start(3, 2), [0, 2], 1), {}, lambda: None)
    other = replace(start(3, 2), server_state={"aggregator": start(3, 2).server_state["selector"]})
    with pytest.raises(
        BadInput,
        match=r"no table 'aggregator\.V': in the version that wrote it, this recipe had other pieces",
    ):
        journal(tmp_path).restore(other, lambda marks: None)


def test_a_ledger_line_holds_no_nan():
    assert replace_non_finite({"a": float("nan"), "b": [float("inf"), 1.5], "c": ("x", None)}) == {
        "a": None,
        "b": [None, 1.5],
        "c": ["x", None],
    }


def test_a_ledger_goes_on_where_it_was(tmp_path):
    """Lines of a round that was never committed are cut."""
    ledger = Ledger(tmp_path / "run", "seed = 1\n", {}, False)
    state = ledger.restore(start(4, 3))
    first = step(state, [1], 1)
    ledger.append(first)
    ledger.files["rounds.jsonl"].append(b'{"t":2,"outcome":"com')
    ledger.close()
    again = Ledger(tmp_path / "run", "seed = 1\n", {}, True)
    found = again.restore(start(4, 3))
    again.close()
    alike(found, first.state)
    assert found.history == (RoundRecord(1),)
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes().count(b"\n") == 1
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes().endswith(b"\n")


def test_the_commit_before_is_whole_at_every_moment(tmp_path):
    """Killed just before its rename, a commit has not touched the two manifests that were there."""
    kept, state = journal(tmp_path), start(4, 3)
    for t in (1, 2):
        done = step(state, [t], t)
        kept.save(done, {}, lambda: None)
        state = done.state

    def die():
        raise BadInput("killed here")

    with pytest.raises(BadInput):
        kept.save(step(state, [3], 3), {}, die)
    assert [commit.t for _, commit, _ in read_manifests(tmp_path)[0]] == [2, 1]
    (tmp_path / "000002.state").unlink()
    assert restored(tmp_path, 4, 3).t == 1
