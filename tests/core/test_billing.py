"""What is billed: evaluations that a stop rule reads, besides what training costs."""

import pytest

from flrce.core.pieces import NeverStop
from flrce.flower.guarded_strategy import EveryRound
from flrce.methods.stopping.budget import AnyOf, CostBudget, Patience
from flrce.methods.stopping.conflict import UpdateConflicts
from flrce.methods.stopping.distance_growth import DistanceGrowth
from flrce.methods.stopping.no_headway import NoHeadway


@pytest.mark.parametrize(
    ("rule", "reads"),
    [
        (NeverStop(), False),
        (CostBudget(rounds=3), False),
        (UpdateConflicts(2.0), False),
        (DistanceGrowth(), False),
        (NoHeadway(), False),
        (Patience(), True),
        (AnyOf((NeverStop(), CostBudget(rounds=3))), False),
        (AnyOf((NeverStop(), AnyOf((Patience(), NeverStop())))), True),
        (EveryRound(UpdateConflicts(2.0)), False),
        (EveryRound(Patience()), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_rule_says_whether_it_reads_evaluations(rule, reads):
    assert rule.reads_evaluations is reads
