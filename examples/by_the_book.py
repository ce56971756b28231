"""FLrce in plain loops, as close to the paper's four algorithms as Python gets. Slow on purpose:
the tests' oracle.

Run it: `python examples/by_the_book.py` trains logistic regression on the digits with 20 clients, 4
a round.
"""

import math
import random

Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def norm(a: Vector) -> float:
    return math.sqrt(dot(a, a))


def plus(a: Vector, b: Vector) -> Vector:
    return [x + y for x, y in zip(a, b, strict=True)]


def minus(a: Vector, b: Vector) -> Vector:
    return [x - y for x, y in zip(a, b, strict=True)]


def cossim(a: Vector, b: Vector) -> float:
    """Cosine similarity; 0 if either vector is zero."""
    return dot(a, b) / (norm(a) * norm(b)) if norm(a) > 0 and norm(b) > 0 else 0.0


def orthdist(x: Vector, v: Vector, origin: Vector) -> float:
    """Distance of the point x from the line through `origin` along v: what is left of x - origin
    besides v.
    """
    a = minus(x, origin)
    along = dot(a, v) / dot(v, v)
    return norm([ai - along * vi for ai, vi in zip(a, v, strict=True)])


def g(k, t, w, V, R, A=None):
    """Algorithm 1: client k's relationships after round t. V[j] is None for clients never heard
    from.

    A[j] is the model that j started from, for lines through it; None for lines through the origin,
    as eq. 6 prints.
    """
    row = [0.0] * len(V)
    for j in range(len(V)):
        if j == k or V[j] is None or norm(V[j]) == 0 or norm(V[k]) == 0:
            continue
        if R[j] >= t - 1:
            row[j] = cossim(V[j], V[k])
        else:
            origin = A[j] if A else [0.0] * len(w)
            before, after = orthdist(w, V[j], origin), orthdist(plus(w, V[k]), V[j], origin)
            row[j] = (
                max(1 - after / before, -1) if before > 1e-12 else (0.0 if after < 1e-12 else -1.0)
            )
    return row


def h(H, phi, P, clients, draw, shuffled):
    """Algorithm 2: the chosen clients, and whether the round exploits. `draw` is uniform,
    `shuffled` a permutation.
    """
    if draw < phi:
        return [clients[i] for i in shuffled[:P]], False
    return sorted(clients, key=lambda k: (-H[k], k))[:P], True


def es(exploit, updates, psi):
    """Algorithm 3: (stop?, conflicts)."""
    conflicts = 0
    for i, u in enumerate(updates):
        for j, v in enumerate(updates):
            if i != j and dot(u, v) < 0:
                conflicts += 1
    conflicts = conflicts / len(updates)
    return exploit and conflicts >= psi, conflicts


def aggregate(w, updates, n):
    """Eq. 4."""
    total = sum(n)
    for u, nk in zip(updates, n, strict=True):
        w = plus(w, [nk / total * x for x in u])
    return w


def flrce(train, w, n, M, P, T, psi, rng, decay=0.98):
    """Algorithm 4. `train(k, w, t)` returns u_k. Yields (t, chosen, exploit, conflicts, w, Omega,
    H).
    """
    V, R = [None] * M, [-math.inf] * M
    Omega, H = [[0.0] * M for _ in range(M)], [0.0] * M
    for t in range(1, T + 1):
        chosen, exploit = h(H, decay ** (t - 1), P, range(M), rng.random(), rng.sample(range(M), M))
        updates = [train(k, w, t) for k in chosen]
        for k, u in zip(chosen, updates, strict=True):
            V[k], R[k] = u, t
        new = aggregate(w, updates, [n[k] for k in chosen])
        for k in chosen:
            Omega[k] = g(k, t, w, V, R)
            H[k] = math.fsum(Omega[k])
        stop, conflicts = es(exploit, updates, psi)
        w = new
        yield t, chosen, exploit, conflicts, w, Omega, H
        if stop:
            return


def main():
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), random.Random(0)
    order = sorted(
        range(len(digits.target)), key=lambda i: digits.target[i] * 10 + rng.random() * 40
    )
    parts = [order[k::20] if k < 4 else order[k * 90 - 360 : k * 90 - 270] for k in range(20)]
    parts = [[i for i in part if i < len(order)] or order[:20] for part in parts]

    def train(k, w, t):
        """One epoch of gradient descent on a linear softmax classifier, sample by sample."""
        local = list(w)
        for i in parts[k][:40]:
            x = [pixel / 16 for pixel in digits.data[i]] + [1.0]
            z = [dot(local[65 * c : 65 * c + 65], x) for c in range(10)]
            top = max(z)
            e = [math.exp(v - top) for v in z]
            for c in range(10):
                slope = e[c] / sum(e) - (c == digits.target[i])
                for p in range(65):
                    local[65 * c + p] -= 0.1 * slope * x[p]
        return minus(local, w)

    start = [rng.gauss(0, 0.01) for _ in range(650)]
    for t, chosen, exploit, conflicts, w, _, H in flrce(
        train, start, [len(p) for p in parts], 20, 4, 8, 2.0, rng
    ):
        right = sum(
            max(
                range(10),
                key=lambda c: dot(
                    w[65 * c : 65 * c + 65], [p / 16 for p in digits.data[i]] + [1.0]
                ),
            )
            == digits.target[i]
            for i in range(0, 1797, 9)
        )
        print(
            f"round {t}: clients {chosen}, {'exploit' if exploit else 'explore'}, conflicts"
            f" {conflicts:.1f}, accuracy {right / 200:.2f}, best H {max(H):.2f}"
        )


if __name__ == "__main__":
    main()
