"""Methods by family: what each changes in federated averaging."""

#: every method once, by what it changes; `flrce recipes list` prints them in this order
FAMILIES: dict[str, tuple[str, ...]] = {
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
    ),
    "asynchronous": ("fedbuff", "fedasync"),
    "personalised models": ("fedbn", "fedper", "fedrep", "ditto", "apfl"),
    "robust to attackers": ("trimmed-mean", "median", "krum", "clipped-mean"),
    "energy": ("eafl", "fedclean", "fedjoule", "autofl"),
    "language models": ("fedit", "ffa-lora", "flora", "fedkseed"),
}  # fmt: skip
