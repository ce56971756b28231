"""FedJAX: its federated averaging, one jitted step per batch, on one core (XLA's own threads with
more).

It has no mutable state, so BatchNorm uses each batch's statistics in evaluations too, and the
starting weights are haiku's own draw.
"""

import os

from work import BATCH, CHUNK, CLASSES, EPOCHS, LR, Meter, P, Work, options, tally

GIVEN = options(__doc__)
if GIVEN.cores == 1:
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402


def forward(batch) -> jax.Array:
    x = batch["x"]
    for channels in (6, 16):
        x = hk.Conv2D(channels, 3, padding="SAME")(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
        x = hk.max_pool(x, (2, 2, 1), (2, 2, 1), "VALID")
    x = hk.Flatten()(x)
    for width in (120, 84):
        x = jax.nn.relu(hk.Linear(width, with_bias=False)(x))
    return hk.Linear(CLASSES)(x)


class Counted(fedjax.ClientDataset):
    """A client's samples; tallies the batches it hands out."""

    def shuffle_repeat_batch(self, *what, **how):
        for batch in super().shuffle_repeat_batch(*what, **how):
            tally(len(batch["y"]), True)
            yield batch


def main() -> None:
    work = Work.load(GIVEN.data, GIVEN.seed)
    net = hk.without_apply_rng(hk.transform_with_state(forward))

    def images(index) -> dict:
        return {"x": work.floats(index).transpose(0, 2, 3, 1).copy(), "y": work.y[index]}

    judges = images(work.held.ravel())
    params, state = net.init(jax.random.PRNGKey(0), {k: v[:BATCH] for k, v in judges.items()})

    def loss(params, batch, rng):
        out = jax.nn.log_softmax(net.apply(params, state, batch)[0])
        return -jnp.take_along_axis(out, batch["y"][:, None], 1).mean()

    right = jax.jit(
        lambda params, batch: (net.apply(params, state, batch)[0].argmax(1) == batch["y"]).sum()
    )
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(LR),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=EPOCHS, seed=GIVEN.seed),
    )
    clients = [Counted(images(index)) for index in work.train]
    server, meter = algorithm.init(params), Meter()
    for t in range(1, GIVEN.rounds + 1):
        keys = jax.random.split(jax.random.PRNGKey(t), P)
        chosen = [
            (str(k).encode(), clients[k], key) for k, key in zip(work.choose(t), keys, strict=True)
        ]
        server, _ = algorithm.apply(server, chosen)
        total = 0
        for start in range(0, len(judges["y"]), CHUNK):
            batch = {k: v[start : start + CHUNK] for k, v in judges.items()}
            tally(len(batch["y"]), False)
            total += int(right(server.params, batch))
        meter.round(total / len(judges["y"]))


if __name__ == "__main__":
    main()
