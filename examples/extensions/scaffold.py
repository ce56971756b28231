"""SCAFFOLD (Karimireddy et al. 2020, option II): a method that sends more than an update.

    rounds = 6
    clients = 8
    per_round = 4
    [recipe]
    name = "fedavg"
    trainer = "scaffold:Scaffold"
    aggregator = { piece = "mean", by = "equal" }

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

From Python: `replace(recipes.fedavg(P=4), trainer=Scaffold())`. The link is the client's half: it
goes along g - c_k + c, keeps c_k with the client and sends what changed of it. The trainer is the
server's: it keeps c, sends it with every task and moves it by what came back. So each way carries
the trained floats twice.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flrce import Link, LocalTrainer


@dataclass(frozen=True)
class Control(Link):
    """g - c_k + c; after K steps of length lr, c_k becomes c_k - c + (w_start - w) / (K lr)."""

    def begin_round(self, w, local, client_state):
        c, ck = local.task.tensors["c"], client_state.get("c", torch.zeros_like(w))
        way = sum(local.task.update.compute_step_rate(step, local) for step in range(local.steps))
        return {"c": c.to(w.device), "ck": ck, "start": w.clone(), "way": torch.tensor(way)}

    def step(self, g, w, state):
        return g - state["ck"] + state["c"], state

    def end_round(self, w, state):
        new = state["ck"] - state["c"] + (state["start"] - w) / float(state["way"])
        return {"c": new}, {"dc": new - state["ck"]}

    def list_extra_sizes(self, d):
        return {"dc": d}


@dataclass(frozen=True)
class Memory:
    c: Tensor  # (d,) the mean of all clients' c_k


@dataclass(frozen=True)
class Scaffold(LocalTrainer):
    links = (Control(),)

    def check_recipe(self, recipe):
        return (
            "SCAFFOLD needs whole models; drop model.personal and sub-models"
            if recipe.personal or recipe.partial_pieces
            else ""
        )

    def initial_state(self, M, d, D):
        return Memory(torch.zeros(d))

    def assign(self, tasks, state, view):
        return [replace(task, tensors={**task.tensors, "c": state.c}) for task in tasks]

    def observe(self, state, event):
        return Memory(state.c + event.updates.extras["dc"].sum(0) / event.M)
