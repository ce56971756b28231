"""The relationship update against a plain double loop and against its one matrix product, as
ratios.

    python benchmarks/relations.py [--out benchmarks/results/relations.json]

Rounds of all variants are interleaved; each ratio is a median over repeats with its quartiles.
Times themselves are not comparable between machines, the ratios are. The update multiplies a slice
of coordinates at a time, which is faster than torch's product of the same long skinny matrices in
one call: it is compared with both.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

from flrce.core import relations


def setting(M, d, P=10, seed=0):
    """A map that knows everyone, and one round's updates; half of the clients are stale."""
    g = torch.Generator().manual_seed(seed)
    m = relations.init_relationships(M, d)
    for start in range(0, M, 100):
        rows = torch.arange(start, min(start + 100, M))
        m = relations.record_updates(
            m,
            1 if start % 200 else 50,
            torch.zeros(d),
            rows,
            torch.randn(len(rows), d, generator=g),
            False,
        )
    k = torch.randperm(M, generator=g)[:P]
    return m, torch.randn(d, generator=g), k, torch.randn(P, d, generator=g)


def update(m, w, k, U):
    m = relations.record_updates(m, 51, w, k, U, False)
    rows, H = relations.compute_relationships(m, 51, w, k, U)
    m.Omega[k], m.H[k] = rows, H


def product(m, w, k, U):
    return torch.cat([U, w[None]]) @ m.V.T


def sliced(m, w, k, U):
    """The same product as the update takes it."""
    for V in m.V.split(relations.CLIENTS_PER_BLOCK):
        relations._multiply_with_map(U, w, V)


def double_loop(m, w, k, U, pairs):
    """Algorithm 1 pair by pair with torch vectors, for the first `pairs` pairs."""
    for i in range(pairs):
        u, v = U[i % len(U)], m.V[i % len(m.V)]
        if i % 2:
            torch.dot(u, v) / (u.norm() * v.norm())
        else:
            for x in (w, w + u):
                (x - torch.dot(x, v) / torch.dot(v, v) * v).norm()


def elements(m, w, k, U, pairs, count):
    """A cosine over Python floats, element by element, for the first `count` elements of `pairs`
    pairs.
    """
    for i in range(pairs):
        u, v = U[i % len(U)][:count].tolist(), m.V[i % len(m.V)][:count].tolist()
        dot = uu = vv = 0.0
        for x, y in zip(u, v, strict=True):
            dot, uu, vv = dot + x * y, uu + x * x, vv + y * y


def timed(work, *arguments):
    start = time.thread_time()  # CPU seconds: others' work on the machine does not count
    work(*arguments)
    return time.thread_time() - start


def available():
    """Bytes that may still be used."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--largest", type=int, default=10_000, help="largest M of the growth curve")
    options = parser.parse_args()
    torch.set_num_threads(1)  # one thread: the steadier figure on a shared machine
    m, w, k, U = setting(100, 134_902)
    update(m, w, k, U)
    product(m, w, k, U)
    to_product, to_sliced, to_loop, to_elements = [], [], [], []
    for _ in range(options.repeats):
        fast = timed(update, m, w, k, U)
        to_product.append(fast / timed(product, m, w, k, U))
        to_sliced.append(fast / timed(sliced, m, w, k, U))
        to_loop.append(timed(double_loop, m, w, k, U, 50) * (10 * 99 / 50) / fast)
        to_elements.append(timed(elements, m, w, k, U, 2, 10_000) * (10 * 99 / 2) * 13.4902 / fast)
    result = {
        "update / torch's matrix product": spread(to_product),
        "update / its own product, by slices": spread(to_sliced),
        "double loop over pairs / update": spread(to_loop),
        "Python loops over elements / update": spread(to_elements),
        "growth": [],
    }
    for M, d in [
        (100, 26_285),
        (100, 134_902),
        (100, 1_000_000),
        (1000, 134_902),
        (options.largest, 134_902),
    ]:
        if 4 * M * (d + M) > 0.8 * available():
            print(f"M = {M:,}, d = {d:,} left out: V and Omega need {4e-9 * M * (d + M):.1f} GB")
            continue
        m = None  # the last one's memory
        m, w, k, U = setting(M, d)
        update(m, w, k, U)
        times = [[timed(work, m, w, k, U) for work in (update, product, sliced)] for _ in range(5)]
        ratios = (statistics.median(row[0] / row[i] for row in times) for i in (1, 2))
        per = statistics.median(row[0] for row in times) / (M * d)
        names = ("update / product", "update / by slices", "ns per M d")
        result["growth"].append(
            {"M": M, "d": d, **dict(zip(names, (*ratios, 1e9 * per), strict=True))}
        )
    result["hardware"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread"
    )
    for name, value in result.items():
        if name == "growth":
            for row in value:
                print(
                    f"  M {row['M']:>6}  d {row['d']:>8}  update/product"
                    f" {row['update / product']:.2f}  by slices {row['update / by slices']:.2f} "
                    f" {row['ns per M d']:.3f} ns per M d"
                )
        elif isinstance(value, dict):
            print(f"{name}: {value['median']:.2f} ({value['low']:.2f}-{value['high']:.2f})")
        else:
            print(f"{name}: {value}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
