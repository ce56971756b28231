"""What a target costs, worked by hand."""

from flrce.results.reach import Reached, reached
from flrce.types import Record


def test_costs_up_to_the_round_that_was_good_enough():
    history = (
        Record(1, accuracy=0.5, joules=10.0, bytes_up=3, bytes_down=4, grams=0.5, began=0.0, seconds=7.0),
        Record(2, "abandoned", joules=1.0, grams=0.1, began=7.0, seconds=2.0),
        Record(2, accuracy=0.7, averaged=0.9, joules=20.0, bytes_up=3, grams=1.0, began=100.0, seconds=8.0),
        Record(3, accuracy=0.95, joules=40.0, began=108.0, seconds=8.0),
    )
    assert reached(history, 0.9) == Reached(2, 108.0, 31.0, 10, 1.6)  # the averaged model is what is handed back
    assert reached(history, 0.4) == Reached(1, 7.0, 10.0, 7, 0.5)
    assert reached(history, 0.96) is None
    errors = tuple(
        Record(t, metric="mae", lower=True, metrics={"mae": value}, joules=1.0, began=5.0 * (t - 1), seconds=5.0)
        for t, value in ((1, 3.0), (2, 1.5))
    )
    assert reached(errors, 2.0) == Reached(2, 10.0, 2.0, 0, 0.0)
