"""How often does the preset `authors` choose other clients than FLrce's released code?

    python research/verification/sequential.py --code DIR [--seeds 0-4] [--out FILE]

The released server updates its map client by client, so that pairs of one round are updated twice
and the result depends on the order of the replies. The preset `authors` updates each pair once.
Both watch the same federated averaging on the embedded digits (the released code chooses, in the
order in which replies are processed), and so does the released code with the replies reversed.
"""

import argparse
import logging
import sys
import typing
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from released import load_definitions
from torch import Tensor

from flrce.cli.options import parse_seeds
from flrce.core.linalg import gram_matrix, mean_conflicts
from flrce.core.types import RoundEvent, Updates
from flrce.methods.catalogue import recipes
from flrce.models.flat import pack_model
from flrce.rng import make_stream

sys.path.insert(0, str(Path(__file__).parents[1] / "studies"))
from stale_relations import make_federation

ROUNDS, PER_ROUND, REGIMES = 60, 10, ("dirichlet", "quantity")
UTILITIES = ("compute_update", "get_cosine_similarity", "get_projection", "get_orthogonal_distance")
COLUMNS = (  # heading, digits
    ("rounds with other clients in the top P, %", 1),
    ("clients of the top P that differ, %", 1),
    ("largest difference of an H", 2),
    ("rounds with another count of conflicts, %", 1),
    ("rounds in which only one reaches psi = 5, %", 1),
)


def load_released_server(code: Path, M: int) -> Any:
    """The released strategy without Flower; a model is a list with one vector."""
    namespace = {"np": np, "deepcopy": deepcopy, "math": __import__("math")}
    utilities = load_definitions(
        code, "flrce", "cifar10/util.py", UTILITIES, namespace | vars(typing)
    )
    utilities["get_joint"] = lambda a, b: (np.concatenate(a), np.concatenate(b))  # as the slow loop
    for name in ("ClientManager", "ClientProxy", "FitIns", "FitRes"):
        namespace[name] = object
    namespace |= {name: utilities[name] for name in UTILITIES} | vars(typing)
    base = SimpleNamespace(FedAvg=object)
    namespace["fl"] = SimpleNamespace(server=SimpleNamespace(strategy=base))
    namespace["get_filters"] = namespace["parameters_to_ndarrays"] = lambda model: model
    namespace["DECAY_FACTOR"] = 1
    found = load_definitions(code, "flrce", "cifar10/FLrce.py", ["FLrce_strategy"], namespace)
    server = object.__new__(found["FLrce_strategy"])
    server.relation_map, server.consesus = np.zeros((M, M)), np.zeros((M, M))
    server.latest_local_updates, server.latest_globalparam = {}, {}
    server.last_update_round, server.min_available_clients_ = {}, M
    return server


def show_round(server: Any, t: int, w: Tensor, updates: dict[int, Tensor]) -> float:
    """What the released `aggregate_fit` does with a round's replies; returns its conflicts."""
    server.global_model = [w.double().numpy()]
    results = [
        (SimpleNamespace(cid=str(k)), SimpleNamespace(parameters=[(w + u).double().numpy()]))
        for k, u in updates.items()
    ]
    known = deepcopy(server.latest_local_updates)
    for client, reply in results:
        server.record_latest_starting_point(client.cid, reply.parameters)
        server.set_last_update_round(client.cid, t)
        server.record_latest_local_update(client.cid, reply.parameters, server.global_model)
        server.update_relationship(client.cid, reply.parameters, t, uDict=known)
    for client, reply in results:
        server.update_current_relationship(client.cid, reply.parameters, results)
    return float(server.get_conflicts(results))


def get_scores(server: Any) -> np.ndarray[Any, Any]:
    scores = server.get_effectiveness_map()
    return np.array([scores[str(k)] for k in range(len(scores))])


def choose_top(scores: np.ndarray[Any, Any]) -> set[int]:
    """The P clients with the largest scores; ties go to the lower id, as in both programs."""
    return {*np.argsort(-scores, kind="stable")[:PER_ROUND].tolist()}


def compare_seed(code: Path, regime: str, seed: int) -> dict[str, Sequence[float]]:
    """Shares of rounds, for flrce and for the released code with reversed replies."""
    federation = make_federation_of_digits(regime, seed)
    M = len(federation.parts)
    released, reverse = load_released_server(code, M), load_released_server(code, M)
    selector = recipes.flrce(5.0, "authors", PER_ROUND).selector
    w = pack_model(federation.net)
    state = selector.initial_state(M, len(w), len(w))
    rows: dict[str, list[list[float]]] = {"preset `authors`": [], "released, replies reversed": []}
    for t in range(1, ROUNDS + 1):
        rng = make_stream(seed, "select", t)
        explore = rng.random() < 0.98 ** (t - 1)
        top = sorted(choose_top(get_scores(released)))
        cohort = (
            rng.permutation(M)[:PER_ROUND].tolist() if explore else rng.permutation(top).tolist()
        )
        updates = {k: federation.train(w, k, t) for k in cohort}
        U, n = torch.stack([*updates.values()]), [len(federation.parts[k]) for k in cohort]
        after = w + (torch.tensor(n) / sum(n)).float() @ U
        conflicts = show_round(released, t, w, updates)
        other = show_round(reverse, t, w, dict(reversed(updates.items())))
        found = Updates(torch.tensor(cohort), U, torch.tensor(n).double(), U.shape[1])
        state = selector.observe(state, RoundEvent(t, w, after, found, M, tuple(cohort)))
        mine = float(mean_conflicts(gram_matrix(U)))
        if t >= 10:  # before, most scores are 0
            scores = get_scores(released)
            for name, theirs, count in (
                ("preset `authors`", state.H.double().numpy(), mine),
                ("released, replies reversed", get_scores(reverse), other),
            ):
                apart = len(choose_top(scores) - choose_top(theirs))
                row = [100.0 * (apart > 0), 100 * apart / PER_ROUND]
                row += [float(np.abs(scores - theirs).max()), 100.0 * (count != conflicts)]
                rows[name].append([*row, 100.0 * ((count >= 5) != (conflicts >= 5))])
        w = after
    return {name: np.mean(found, axis=0).tolist() for name, found in rows.items()}


def make_federation_of_digits(regime: str, seed: int) -> Any:
    from flrce.data.sources import load_source

    return make_federation(load_source("digits"), "digits", regime, seed)


def main() -> None:
    from flrce_reproduction.tables import SeedInterval

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", type=Path, required=True, help="folder of the repositories")
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    headings = ("data", "compared with the released code", *(name for name, _ in COLUMNS))
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    for regime in REGIMES:
        found = [compare_seed(options.code, regime, seed) for seed in parse_seeds(options.seeds)]
        for name in found[0]:
            cells = [
                SeedInterval.from_values(one[name][i] for one in found) for i in range(len(COLUMNS))
            ]
            shown = [cell.format_interval(2 if i == 2 else 1) for i, cell in enumerate(cells)]
            lines.append(f"| digits, {regime} | {name} | {' | '.join(shown)} |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
