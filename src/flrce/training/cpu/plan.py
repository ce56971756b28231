"""What a network becomes: fused stages, each with the tensors it holds and the stages it reads."""

from dataclasses import dataclass

from flrce.models.flat import ModelLayout

Size = tuple[int, int]
Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Norm:
    """A BatchNorm by the names of its tensors in w; gamma is "" where it is not affine."""

    gamma: str
    beta: str
    mean: str
    var: str
    eps: float
    momentum: float


@dataclass(frozen=True)
class Group:
    """A GroupNorm likewise; gamma or beta is "" where it has none."""

    groups: int
    gamma: str
    beta: str
    eps: float


@dataclass(frozen=True)
class Stage:
    """One fused step. `op` is conv, linear, none; alone in their stage: pool (one that overlaps or
    is padded), average, and group and sum, which take an activation.
    """

    op: str
    # into the chain's trained layers: the block it is frozen with; 0 where layers are skipped
    index: int
    # the stages it reads, SAMPLE for what comes in; only a sum may read two
    sources: tuple[int, ...]
    inside: Shape
    middle: Shape  # after the product
    out: Shape  # after pooling
    kernel: Size = (1, 1)
    stride: Size = (1, 1)
    padding: Size = (0, 0)
    weight: str = ""
    bias: str = ""
    norm: Norm | None = None
    group: Group | None = None
    act: str = "PLAIN"
    pool: Size = (1, 1)

    @property
    def learns(self) -> bool:
        normal = (self.norm and self.norm.gamma) or (
            self.group and (self.group.gamma or self.group.beta)
        )
        return bool(self.weight or normal)


@dataclass(frozen=True)
class Plan:
    """The stages of a net and where its tensors lie in w."""

    stages: tuple[Stage, ...]
    layout: ModelLayout
    classes: int
    blocks: int  # how many trained layers, the limit of `first`; 1 where layers are skipped

    @property
    def has_skip_connections(self) -> bool:
        """Whether any stage's output is read by another than the next."""
        return any(stage.op == "sum" for stage in self.stages)
