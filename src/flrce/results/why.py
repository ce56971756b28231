"""Why a run went as it did, in sentences with the numbers: a round, a client, the stop."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flrce.errors import BadInput, nearest
from flrce.results.detail import client_costs, final_map, headways
from flrce.results.price import rule_of, sentence, verdicts
from flrce.results.scores import draw, scores
from flrce.results.selection import describe_reach, describe_selection
from flrce.results.story import about, decided, describe_baseline, reason
from flrce.results.tables import figures
from flrce.store import headline as words
from flrce.store.read import Run
from flrce.types import Record

PEERS = 3  # named on either side


@dataclass(frozen=True)
class Answer:
    """Sentences for a person, and the same facts for a program."""

    sentences: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    def say(self, sentence: str, **facts: object) -> None:
        self.sentences.append(sentence)
        self.facts.update(facts)


def clean(name: str) -> str:
    """A client's name, fit for a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name)


def locate(run: Run, t: int) -> Record:
    """Round t, as it was committed or last tried."""
    tried = [h for h in run.rounds if h.t == t]
    if not tried:
        last = run.rounds[-1].t if run.rounds else 0
        raise BadInput(
            f"--round {t} is not in {run.folder}: " + (f"use 1 to {last}" if last else "it has no round yet")
        )
    return tried[-1]


def row_of(run: Run, client: str) -> int:
    if client not in run.row:
        raise BadInput(f"--client {client!r} is not in {run.folder}: {nearest(client, map(clean, run.roster[:200]))}")
    return run.row[client]


def why_round(run: Run, t: int) -> Answer:
    """How round t chose, what came back, what it changed."""
    h, answer, before = locate(run, t), Answer(), scores(run, t)
    answer.say(
        describe_selection(run, h), round=t, exploit=h.exploit, draw=draw(run, h), outcome=h.outcome, **dict(h.why)
    )
    chosen = []
    for client in h.chosen:
        k, entry = run.row[client], dict[str, object](client=client)
        text = clean(client)
        if before is not None and "due" not in h.why:
            entry |= {"H": float(before.H[k]), "rank": before.rank[k]}
            text += f" ({before.told(k)})"
        chosen.append((text, entry))
    if chosen:
        head = "Chosen" if before is None or "due" in h.why else "Chosen, with how much each agrees with the others"
        answer.say(f"{head}: {', '.join(text for text, _ in chosen)}.", chosen=[entry for _, entry in chosen])
    if h.rejected:
        told = "; ".join(f"{clean(client)}: {clean(reason)}" for client, reason in h.rejected.items())
        answer.say(f"Did not count: {told}.", rejected=dict(h.rejected))
    if h.flagged:
        told = "; ".join(f"{clean(client)}: {clean(reason)}" for client, reason in h.flagged.items())
        answer.say(f"Counted, but looked odd: {told}.", flagged=dict(h.flagged))
    if h.doubted:
        told = ", ".join(f"{clean(client)} ({share:.2g})" for client, share in h.doubted.items())
        answer.say(f"Counted less, by the share of its weight that each kept: {told}.", doubted=dict(h.doubted))
    if h.outcome != "committed":
        answer.say(f"The round was {h.outcome}" + (f": {h.stop}." if h.stop else "."))
        return answer
    _result(run, h, answer)
    return answer


def _result(run: Run, h: Record, answer: Answer) -> None:
    peers = max(len(h.replied) - 1, 0)
    what = f"A client's update pulled against {run.conflicts(h):.2f} of {peers} peers on average"
    text = what if peers else "One reply came, so that there was nobody for it to pull against"
    if run.psi is not None:
        stands = "at or above" if run.conflicts(h) >= run.psi else "below"
        looks = "" if h.exploit else "; the rule looks at exploit rounds only"
        text += f", {stands} the limit psi = {run.psi:g}{looks}"
    answer.say(text + ".", conflicts=run.conflicts(h), psi=run.psi, consensus=h.consensus)
    if h.headline is not None:
        averaged = "" if h.averaged is None else f" ({words.shown(h.metric, h.averaged)} for the server average)"
        value = f"{words.name(h.metric)} {words.shown(h.metric, h.headline)}{averaged}."
        answer.say(value, **{h.metric.replace("-", "_"): h.headline, "averaged": h.averaged})
    if h.stop:
        answer.say(f"The run stopped here: {h.stop}.", stop=h.stop)


def why_client(run: Run, client: str, t: int | None = None) -> Answer:
    """A client's part in the run, or why it was (not) chosen in round t."""
    k, answer = row_of(run, client), Answer()
    if t is not None:
        _in_round(run, k, locate(run, t), answer)
    else:
        _overall(run, k, answer)
    _peers(run, k, t, answer)
    return answer


def _in_round(run: Run, k: int, h: Record, answer: Answer) -> None:
    name, before = f"Client {clean(run.roster[k])}", scores(run, h.t)
    was = run.roster[k] in h.chosen
    answer.say(
        describe_selection(run, h), client=run.roster[k], round=h.t, chosen=was, exploit=h.exploit, draw=draw(run, h)
    )
    if before is None or "due" in h.why:
        answer.say(f"{name} was {'' if was else 'not '}among them.")
    elif h.exploit:
        least = min((before.H[run.row[c]] for c in h.chosen), default=0.0)
        answer.say(
            f"{name}, by how much it agrees with the others: {before.told(k)}; the last one taken had {least:+.2f}, "
            f"so it was {'' if was else 'not '}chosen.",
            H=float(before.H[k]), rank=before.rank[k], cut=float(least),
        )  # fmt: skip
        if not was and before.H[k] > least:
            answer.say("By that alone it would have been: it was out of reach, or had been chosen too often of late.")
    else:
        answer.say(
            f"{name} was {'' if was else 'not '}drawn; how much it agrees with the others ({before.told(k)}) played "
            "no part.",
            H=float(before.H[k]), rank=before.rank[k],
        )  # fmt: skip
    if reason := h.rejected.get(run.roster[k]):
        answer.say(f"Its reply did not count: {clean(reason)}.", rejected=reason)
    if odd := h.flagged.get(run.roster[k]):
        answer.say(f"Its update looked odd: {clean(odd)}.", flagged=odd)
    if run.roster[k] in h.doubted:
        share = h.doubted[run.roster[k]]
        answer.say(f"Its reply counted with {share:.2g} of its weight.", doubted=share)


def _overall(run: Run, k: int, answer: Answer) -> None:
    name = run.roster[k]
    rounds = [h for h in run.rounds if name in h.chosen]
    exploit = sum(h.exploit for h in rounds)
    split = f", {exploit} of them in exploit rounds" if any(h.exploit for h in run.rounds) else ""
    answer.say(
        f"Client {clean(name)} was chosen in {len(rounds)} of {len(run.rounds)} rounds{split}"
        + (f", last in round {rounds[-1].t}." if rounds else "."),
        client=name, chosen=[h.t for h in rounds], exploited=exploit,
    )  # fmt: skip
    lost = [(h.t, h.rejected[name]) for h in rounds if name in h.rejected]
    if lost:
        answer.say(f"{len(lost)} replies did not count, last in round {lost[-1][0]}: {clean(lost[-1][1])}.", lost=lost)
    _doubts(run, name, rounds, answer)
    cost = {key: values[0] for key, values in client_costs(run, [k]).items()}
    answer.say(
        f"It spent {cost['joules'] + cost['joules_wasted']:.4g} J ({cost['joules_wasted']:.4g} wasted) and "
        f"{(cost['bytes'] + cost['bytes_wasted']) / 1e6:.4g} MB ({cost['bytes_wasted'] / 1e6:.4g} wasted).",
        **{key: value for key, value in cost.items() if key != "n"},
    )  # fmt: skip
    values = run.final.get("clients", [])
    if run.final.get("metric") == "accuracy" and k < len(values) and values[k] is not None:
        known = sorted(value for value in values if value is not None)
        place = known.index(values[k]) + 1
        answer.say(
            f"The final model gets {100 * values[k]:.1f} % of its hold-out right, rank {place} of {len(known)} "
            "from below.",
            accuracy=values[k],
        )
    final = scores(run, run.rounds[-1].t + 1) if run.rounds else None
    if final is not None:
        told = f"How much it agrees with the others now: {final.told(k)}."
        answer.say(told, H=float(final.H[k]), rank=final.rank[k])


def _doubts(run: Run, name: str, rounds: Sequence[Record], answer: Answer) -> None:
    """What was odd about a client's updates, and what became of their weight."""
    odd = [(h.t, h.flagged[name]) for h in rounds if name in h.flagged]
    if odd:
        answer.say(f"{len(odd)} of its updates looked odd, last in round {odd[-1][0]}: {clean(odd[-1][1])}.", odd=odd)
    doubted = [(h.t, h.doubted[name]) for h in rounds if name in h.doubted]
    if doubted:
        came = sum(name in h.replied for h in rounds)
        mean = float(np.mean([share for _, share in doubted]))
        piece = type(run.recipe.aggregator).__name__ if run.recipe else "the aggregator"
        answer.say(
            f"{len(doubted)} of its {came} replies counted less ({piece}): {mean:.2g} of their weight was left on "
            f"average, {doubted[-1][1]:.2g} in round {doubted[-1][0]}.",
            doubted=doubted,
        )


def _peers(run: Run, k: int, t: int | None, answer: Answer) -> None:
    """Who the client agrees and disagrees with most, as known before round t (or at the end)."""
    Omega = final_map(run, None if t is None else t - 1)
    if Omega is None:
        return
    order = np.argsort(-Omega[k], kind="stable")
    for head, peers in (("agrees", order[:PEERS]), ("disagrees", order[::-1][:PEERS])):
        sign = 1 if head == "agrees" else -1
        named = [(run.roster[j], float(Omega[k, j])) for j in peers if sign * Omega[k, j] > 0]
        if named:
            told = ", ".join(f"{clean(name)} ({value:+.2f})" for name, value in named)
            answer.say(f"It {head} most with {told}.", **{head: named})


def _stopped(run: Run, T: int) -> str:
    """The sentence on a run that a rule ended, before its last round or with it."""
    stop, plain = run.rounds[-1].stop, reason(run)
    told = f"{plain} [{stop}]"
    if decided(run) == "gain":
        told = plain
    elif stop.startswith(plain):
        told = stop
    if len(run.done) >= T:
        return f"The run went through all {T} rounds, and its stop rule was met in the last: {told}."
    return f"The run stopped after round {len(run.done)} of {T}: {told}."


def why_stop(run: Run) -> Answer:
    """Why the run ended when it did."""
    answer, T = Answer(), int(run.experiment.get("rounds", 100))
    if not run.rounds:
        answer.say("No round is committed yet.")
        return answer
    last = run.rounds[-1]
    if last.stop:
        answer.say(_stopped(run, T), stop=last.stop, rounds=len(run.done))
    else:
        whole = f"No rule stopped the run: it went through all {T} rounds."
        part = f"The run is unfinished: {len(run.done)} of {T} rounds are committed."
        answer.say(whole if len(run.done) >= T else part, stop="", rounds=len(run.done))
    if reach := describe_reach(run):
        answer.say(reach)
    exploits = [h for h in run.done if h.exploit]
    looks = verdicts(run) if rule_of(run) else []
    if looks:
        answer.say(sentence(run, looks[-1]), gain=looks[-1].gain, price=looks[-1].price, rise=looks[-1].trend.slope)
    course = headways(run)
    if course["least"] is not None:
        means = [mean for mean in course["course"] if mean is not None]
        answer.say(
            "Headway says how far a round goes on where those before it went: 1 straight on, 0 astray, below 0 back. "
            f"A mean below {course['least']:.3f} is a standstill; over the last rounds it was {means[-1]:.3f}.",
            headway=means[-1], least=course["least"],
        )  # fmt: skip
    if run.psi is None:
        answer.facts["psi"] = None
    elif not exploits:
        answer.say(f"The limit psi = {run.psi:g} was never tested: no round chose by what is known.", psi=run.psi)
    else:
        top = max(exploits, key=run.conflicts)
        answer.say(
            f"Its rule ends a run once a chosen client has psi = {run.psi:g} peers whose updates pull against its own; "
            f"the most in the {len(exploits)} rounds that chose by what is known were {run.conflicts(top):.2f}, in "
            f"round {top.t}.",
            psi=run.psi, most=run.conflicts(top), most_round=top.t, exploit_rounds=len(exploits),
        )  # fmt: skip
    firsts = run.summary["shadow_stops"]
    answer.facts["shadow_stops"] = firsts
    if firsts and run.psi is not None:
        told = ", ".join(f"{psi} in round {t}" for psi, t in firsts.items())
        answer.say(f"Other limits psi would have ended it: {told}.")
    end = figures(run)
    metric = str(run.summary.get("metric", "accuracy"))
    value, other = end["accuracy"], run.summary.get("value_last", end["accuracy_last"])
    if value is not None:
        both = "" if other is None or other == value else f" (the last model: {words.shown(metric, other)})"
        said = f"{words.name(metric)} of the final model: {words.shown(metric, value)}{both}."
        answer.say(said, **{metric.replace("-", "_"): value})
    if constant := describe_baseline(run):
        answer.say(f"For comparison: {constant}.")
    for note in about(run):
        answer.say(f"Note: {note}.")
    return answer
