"""FedAdam (Reddi et al. 2021): the server steps with Adam, after any aggregator.

    rounds = 8
    clients = 8
    per_round = 4
    [recipe]
    name = "median"
    server = { piece = "adam", rate = 0.03 }

    $ PYTHONPATH=examples/extensions flrce run experiment.toml

From Python: `flrce.run(flrce.Experiment(recipe=RECIPE))`, or `replace(recipes.median(P=4),
server=ServerAdam(0.03))`. feddyn.py has a step of its own.
"""

RECIPE = {"name": "median", "server": {"piece": "adam", "rate": 0.03}}
