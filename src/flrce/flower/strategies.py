"""Our strategies under Flower's own interface: FLrce, any recipe, and any of Flower's strategies behind our gate."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Strategy

from flrce import recipes
from flrce.errors import BadInput
from flrce.flower import guard
from flrce.flower.client import Local, client_app, compressing, introduce
from flrce.flower.engine import FlowerEngine
from flrce.flower.grid import LocalGrid
from flrce.flower.session import Result
from flrce.flower.strategy import Ours
from flrce.pieces import Compressor, Recipe
from flrce.servers.averages import EMA

EASE = 4.0  # of the models' average: 3 % of the way to it after 5 rounds, 18 % after 10, 59 % after 20, 94 % after 40

__all__ = [
    "FLrce", "Guarded", "Local", "LocalGrid", "RecipeStrategy", "Result", "client_app", "compressing", "introduce",
]  # fmt: skip


class RecipeStrategy(Ours):
    """Any recipe, of the catalogue or your own, as a Flower strategy.

    Its P counts, not `fraction_train`. The keyword arguments are those of `Ours`.
    """

    def __init__(self, recipe: Recipe | str, **settings: Any) -> None:
        if isinstance(recipe, str):
            if recipe not in recipes.CATALOGUE:
                raise BadInput(f"recipe {recipe!r}: use one of {', '.join(sorted(recipes.CATALOGUE))}")
            recipe = recipes.CATALOGUE[recipe]()
        settings.setdefault("min_train_nodes", recipe.P)
        super().__init__(**settings)
        self.recipe = recipe

    def recipe_for(self, engine: FlowerEngine, P: int) -> Recipe:
        return self.recipe


class FLrce(Ours):
    """Relationship-based selection and early stopping; takes the place of Flower's FedAvg.

    Stops as its preset says, or with `psi` by the paper's rule: once a chosen client has so many conflicting peers on
    average, a number or a percentage of those chosen. `per_round` clients train, or `fraction_train` of those connected
    at first. `compressor` encodes the replies of clients that can (`client_app`, or the mod `compressing`). Where the
    preset averages models (all but `paper`, `authors` and `hardened`), the last model is handed back in short runs, and
    the average in long ones; whichever it is, it is the one that is evaluated. The rest is as in `Ours`.
    """

    def __init__(
        self, *, psi: float | str | None = None, per_round: int | None = None, preset: str = "default",
        compressor: Compressor | None = None, epochs: int = 1, batch: int = 32, lr: float = 0.01, **settings: Any,
    ) -> None:  # fmt: skip
        if per_round is not None:
            settings.setdefault("min_train_nodes", per_round)
            settings.setdefault("fraction_train", 1e-9)
        super().__init__(**settings)
        self.psi, self.preset, self.compressor = psi, preset, compressor
        self.local = {"epochs": epochs, "batch": batch, "lr": lr}

    def recipe_for(self, engine: FlowerEngine, P: int) -> Recipe:
        made = recipes.flrce(self.psi, self.preset, P, **self.local)
        if isinstance(made.average, EMA):
            made = replace(made, average=replace(made.average, ease=EASE))
        return replace(made, compressor=self.compressor) if self.compressor else made


class Guarded(Ours):
    """Any of Flower's own strategies behind our gate, with books, stop rules, budgets, checkpoints and resume.

    Strategies whose arrays change shape from round to round (XGBoost's) cannot be guarded.
    """

    def __init__(self, strategy: Strategy, *, state: Path | str | None = None, seed: int = 0, **settings: Any) -> None:
        inner = getattr(strategy, "strategy", strategy)
        same = ("fraction_train", "min_train_nodes", "arrayrecord_key", "configrecord_key")
        taken = {name: getattr(inner, name) for name in same if hasattr(inner, name)}
        super().__init__(state=state, seed=seed, **{**taken, "min_available_nodes": 1, **settings})
        self.strategy = strategy
        self.extra = tuple(guard.EveryRound(rule) for rule in self.extra)

    def engine_for(self, *args: Any, **kwargs: Any) -> FlowerEngine:
        return guard.GuardedEngine(self.strategy, *args, **kwargs)

    def recipe_for(self, engine: FlowerEngine, P: int) -> Recipe:
        assert isinstance(engine, guard.GuardedEngine)
        return guard.recipe(engine, P)

    def summary(self) -> None:
        super().summary()
        self.strategy.summary()
