"""Our strategies under Flower's own interface: FLrce, any recipe, and any of Flower's strategies
behind our gate.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Strategy

from flrce.core.pieces import Recipe
from flrce.core.roles import Compressor
from flrce.errors import BadInput, format_one_line
from flrce.flower import guarded_strategy
from flrce.flower.engine import FlowerEngine
from flrce.flower.options import require_count
from flrce.flower.strategy import ANY_P, FlrceStrategy
from flrce.methods.catalogue import recipes
from flrce.methods.catalogue.families import CONTRIBUTED_METHODS, suggest_replacement

__all__ = ["FLrce", "Guarded", "RecipeStrategy"]


class RecipeStrategy(FlrceStrategy):
    """Any recipe, of the catalogue or your own, as a Flower strategy.

    Its P counts, or as many as are connected; with `fraction_train`, that share of them. What else
    it takes is as in `FlrceStrategy`.
    """

    def __init__(self, recipe: Recipe | str, *fedavg: Any, **settings: Any) -> None:
        if isinstance(recipe, str):
            if recipe not in recipes.CATALOGUE:
                hint = suggest_replacement(recipe, recipes.CATALOGUE, CONTRIBUTED_METHODS)
                raise BadInput(f"recipe {recipe!r}: {hint}")
            recipe = recipes.CATALOGUE[recipe]()
        if not isinstance(recipe, Recipe):
            raise BadInput(f"recipe {format_one_line(recipe, 40)}: use a Recipe or the name of one")
        if len(fedavg) < 3:
            settings.setdefault("min_train_nodes", min(recipe.P, 2))
        self.refuse_unknown(settings)
        super().__init__(*fedavg, **settings)
        self.recipe, self.by_fraction = recipe, bool(fedavg) or "fraction_train" in settings
        self.kept = recipe.personal

    def draft_recipe(self) -> Recipe:
        return self.recipe

    def choose_cohort_size(self, connected: int) -> int:
        return super().choose_cohort_size(connected) if self.by_fraction else self.recipe.P

    def build_recipe(self, engine: FlowerEngine, P: int) -> Recipe:
        return replace(self.recipe, P=P) if self.by_fraction else self.recipe


class FLrce(FlrceStrategy):
    """Relationship-based selection and early stopping; takes the place of Flower's FedAvg.

    Stops as its preset says, or with `psi` by the paper's rule: once a chosen client has so many
    conflicting peers on average, a number or a percentage of those chosen. `per_round` clients
    train, or `fraction_train` of those that are connected. `compressor` encodes the replies of
    clients that can (`client_app`, or the mod `compressing`).

    Where the preset averages models (all but `paper`, `authors`, and `hardened` with a psi), the
    last model is the final one in short runs and while rounds go straight on, else the average;
    whichever it is, it is evaluated. The rest is as in `FlrceStrategy`.
    """

    def __init__(
        self,
        *fedavg: Any,
        psi: float | str | None = None,
        per_round: int | None = None,
        preset: str = "default",
        compressor: Compressor | None = None,
        epochs: int = 1,
        batch: int = 32,
        lr: float = 0.01,
        **settings: Any,
    ) -> None:
        if per_round is not None and len(fedavg) < 3:
            settings.setdefault("min_train_nodes", min(per_round, 2))
        self.refuse_unknown(settings)
        super().__init__(*fedavg, **settings)
        self.per_round, self.by_fraction = per_round, per_round is None
        self.psi, self.preset, self.compressor = psi, preset, compressor
        self.local = {"epochs": epochs, "batch": batch, "lr": lr}
        if per_round is not None:
            require_count("per_round", per_round, least=1)
        self.draft_recipe()

    def draft_recipe(self) -> Recipe:
        return self._make_recipe(self.per_round or ANY_P)

    def choose_cohort_size(self, connected: int) -> int:
        return self.per_round or super().choose_cohort_size(connected)

    def build_recipe(self, engine: FlowerEngine, P: int) -> Recipe:
        return self._make_recipe(P)

    def _make_recipe(self, P: int) -> Recipe:
        made = recipes.flrce(self.psi, self.preset, P, **self.local)
        return replace(made, compressor=self.compressor) if self.compressor else made


class Guarded(FlrceStrategy):
    """Any of Flower's own strategies behind our gate, with books, stop rules, budgets, checkpoints
    and resume.

    Strategies whose arrays change shape from round to round (XGBoost's) cannot be guarded.
    """

    def __init__(
        self, strategy: Strategy, *, state: Path | str | None = None, seed: int = 0, **settings: Any
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise BadInput(
                f"Guarded({format_one_line(strategy, 40)}): use a strategy of"
                " flwr.serverapp.strategy; see docs/flower.md#from-the-older-interface"
            )
        inner = getattr(strategy, "strategy", strategy)
        same = (
            "fraction_train",
            "min_train_nodes",
            "weighted_by_key",
            "arrayrecord_key",
            "configrecord_key",
        )
        taken = {name: getattr(inner, name) for name in same if hasattr(inner, name)}
        self.refuse_unknown(settings)
        super().__init__(state=state, seed=seed, **{**taken, "min_available_nodes": 1, **settings})
        self.strategy, self.by_fraction = strategy, False
        self._stops = tuple(guarded_strategy.EveryRound(rule) for rule in self._stops)

    def build_engine(self, *args: Any, **kwargs: Any) -> FlowerEngine:
        return guarded_strategy.GuardedEngine(self.strategy, *args, **kwargs)

    def build_recipe(self, engine: FlowerEngine, P: int) -> Recipe:
        assert isinstance(engine, guarded_strategy.GuardedEngine)
        return guarded_strategy.build_guarded_recipe(engine, P)

    def summary(self) -> None:
        super().summary()
        self.strategy.summary()
