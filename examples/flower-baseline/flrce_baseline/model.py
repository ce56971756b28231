"""The network of the paper for the samples at hand, with an initial model that follows from the seed."""

from flwr.app import UserConfig
from torch import nn

from flrce.config.network import build_net
from flrce.data.sources import Source


def build_model(config: UserConfig, source: Source) -> nn.Module:
    return build_net(str(config["model"]), source.spec, int(config["seed"]))
