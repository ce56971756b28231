"""Methods by family: what each changes in federated averaging."""

from collections.abc import Iterable

from flrce.errors import suggest_name

#: every method once, by what it changes; `flrce recipes list` prints them in this order
FAMILIES: dict[str, tuple[str, ...]] = {
    "the default": ("frugal",),
    "FLrce": (
        "flrce", "flrce-no-stop", "flrce-topk", "flrce-dropout", "flrce-freeze",
    ),
    "averaging and server optimizers": (
        "fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedexp", "fedswa", "fednova",
    ),
    "client selection": (
        "oort", "pyramidfl", "power-of-choice", "clustered-sampling", "tifl", "stratified-turns",
        "divfl", "fedlecc",
    ),
    "client drift": ("fedprox", "scaffold", "feddyn", "feddc", "moon", "fedsam"),
    "fewer bytes or less work": (
        "fedcom", "fedcom-quantised", "fedcomgate", "dropout", "heterofl", "timelyfl",
        "dadaquant", "fedluar", "fedolf",
    ),
    "asynchronous": ("fedbuff", "fedasync"),
    "personalised models": ("fedbn", "fedper", "fedrep", "ditto", "apfl"),
    "several global models": ("ifca",),
    "robust to attackers": ("trimmed-mean", "median", "krum", "clipped-mean"),
    "differential privacy": ("dp-fedavg",),
    "language models": ("fedit", "ffa-lora", "flexlora", "fedkseed"),
}  # fmt: skip

#: what each method was compared with; docs/methods.md has the words and the details
EVIDENCE: dict[str, tuple[str, ...]] = {
    "run": (
        "fedavg", "fednova", "oort", "pyramidfl", "divfl", "clustered-sampling", "scaffold",
        "feddyn", "feddc", "moon", "fedcom-quantised", "fedcomgate", "heterofl", "fedasync",
        "fedrep", "trimmed-mean", "median", "krum",
    ),
    "code": (
        "fedexp", "power-of-choice", "fedprox", "fedcom", "fedluar", "fedbuff", "fedbn",
        "apfl",
    ),
    "paper": ("flrce", "flrce-no-stop"),
    "abstract": ("fedlecc", "dadaquant", "fedolf"),
    "recalled": (
        "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedswa", "tifl", "fedsam", "dropout",
        "timelyfl", "fedper", "ditto", "ifca", "dp-fedavg", "fedit", "ffa-lora", "flexlora",
        "fedkseed",
    ),
    "ours": (
        "frugal", "flrce-topk", "flrce-dropout", "flrce-freeze", "stratified-turns",
        "clipped-mean",
    ),
}  # fmt: skip
#: former names of methods, which still work
FORMER_NAMES = {"flora": "flexlora"}

#: methods that were reconstructed from abstracts, and pieces of theirs: files of examples/contrib
CONTRIBUTED_METHODS = {name: name for name in ("eafl", "fedclean", "fedjoule", "autofl")}
CONTRIBUTED_PIECES = {"budgeted": "fedjoule", "rewarded": "autofl"}


def suggest_replacement(name: str, valid: Iterable[str], moved: dict[str, str]) -> str:
    """What to write instead of an unknown name."""
    if name in moved:
        return f"it moved to examples/contrib/{moved[name]}.py, whose docstring shows how to use it"
    return suggest_name(name, valid)


def describe_evidence(name: str) -> str:
    """The word for how a method was verified."""
    return next(word for word, names in EVIDENCE.items() if name in names)
