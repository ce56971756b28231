"""What `flrce advise` tries first: methods, and rates as multiples of the experiment's own.

Chosen on the develop tasks of research/studies/plans/advise-2.json, where FedAvg with an average
at 1 to 27 times the experiment's own rate is within 1.5 points of the best of 60 recipes on three
tasks of four. The others come early because they lead on single tasks there, or need another rate.
"""

from typing import Any

SERVER_AVERAGE = {"average": {"piece": "ema", "ease": 4, "level": 0.15}}
FOUR_BIT_COMPRESSOR = {"compressor": {"piece": "quantize", "bits": 4}}
PLAIN_METHOD = "fedavg + average"
METHODS: dict[str, dict[str, Any]] = {
    PLAIN_METHOD: {"recipe": {"name": "fedavg", **SERVER_AVERAGE}},
    "fedavgm + average": {"recipe": {"name": "fedavgm", **SERVER_AVERAGE}},
    "scaffold + average": {"recipe": {"name": "scaffold", **SERVER_AVERAGE}},
    "feddyn + average": {"recipe": {"name": "feddyn", **SERVER_AVERAGE}},
    "fedadam + average": {"recipe": {"name": "fedadam", **SERVER_AVERAGE}},
    "flrce": {"recipe": {"name": "flrce-no-stop", "preset": "default"}},
    "fedprox + average": {"recipe": {"name": "fedprox", **SERVER_AVERAGE}},
}
FIRST_TRIALS: tuple[tuple[str, float], ...] = (
    (PLAIN_METHOD, 1.0),
    (PLAIN_METHOD, 9.0),
    ("scaffold + average", 3.0),
    ("fedavgm + average", 1.0),
    (PLAIN_METHOD, 3.0),
    ("fedadam + average", 1.0),
)
