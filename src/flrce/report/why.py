"""Why a run went as it did, in sentences with the numbers: a round, a client, the stop."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from flrce.core.record import format_figures
from flrce.core.types import RoundRecord
from flrce.errors import BadInput, suggest_name
from flrce.report.cost_per_point import list_courses
from flrce.report.endings import explain_stop_reason, get_planned_rounds, get_stop_criterion
from flrce.report.run_detail import rebuild_relationship_map, sum_client_costs
from flrce.report.scores import compute_scores_before, recover_selection_draw
from flrce.report.selection import describe_reach, describe_selection
from flrce.report.tables import get_summary_values
from flrce.report.verdict import collect_run_notes, describe_baseline
from flrce.storage import metric_format as words
from flrce.storage.read import RecordedRun

MAX_NAMED_PEERS = 3  # named on either side


@dataclass(frozen=True)
class Explanation:
    """Sentences for a person, and the same facts for a program."""

    sentences: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    def add_sentence(self, sentence: str, **facts: object) -> None:
        self.sentences.append(sentence)
        self.facts.update(facts)


def escape_unprintable(name: str) -> str:
    """A client's name, fit for a terminal."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name)


def find_round(run: RecordedRun, t: int) -> RoundRecord:
    """Round t, as it was committed or last tried."""
    tried = [h for h in run.rounds if h.t == t]
    if not tried:
        last = run.rounds[-1].t if run.rounds else 0
        raise BadInput(
            f"--round {t} is not in {run.folder}: "
            + (f"use 1 to {last}" if last else "it has no round yet")
        )
    return tried[-1]


def find_client_index(run: RecordedRun, client: str) -> int:
    if client not in run.client_indices:
        raise BadInput(
            f"--client {client!r} is not in {run.folder}:"
            f" {suggest_name(client, map(escape_unprintable, run.roster[:200]))}"
        )
    return run.client_indices[client]


def explain_round(run: RecordedRun, t: int) -> Explanation:
    """How round t chose, what came back, what it changed."""
    h, answer, before = find_round(run, t), Explanation(), compute_scores_before(run, t)
    answer.add_sentence(
        describe_selection(run, h),
        round=t,
        exploit=h.exploit,
        draw=recover_selection_draw(run, h),
        outcome=h.outcome,
        **dict(h.why),
    )
    chosen = []
    for client in h.chosen:
        k, entry = run.client_indices[client], dict[str, object](client=client)
        text = escape_unprintable(client)
        if before is not None and "due" not in h.why:
            entry |= {"H": float(before.H[k]), "rank": before.rank[k]}
            text += f" ({before.describe_client(k)})"
        chosen.append((text, entry))
    if chosen:
        head = (
            "Chosen"
            if before is None or "due" in h.why
            else "Chosen, with how much each agrees with the others"
        )
        answer.add_sentence(
            f"{head}: {', '.join(text for text, _ in chosen)}.",
            chosen=[entry for _, entry in chosen],
        )
    for head, key in (("Did not count", "rejected"), ("Counted, but looked odd", "flagged")):
        reasons: Mapping[str, str] = getattr(h, key)
        told = "; ".join(
            f"{escape_unprintable(client)}: {escape_unprintable(reason)}"
            for client, reason in reasons.items()
        )
        if told:
            answer.add_sentence(f"{head}: {told}.", **{key: dict(reasons)})
    if h.doubted:
        told = ", ".join(
            f"{escape_unprintable(client)} ({share:.2g})" for client, share in h.doubted.items()
        )
        answer.add_sentence(
            f"Counted less, by the share of its weight that each kept: {told}.",
            doubted=dict(h.doubted),
        )
    if h.outcome != "committed":
        answer.add_sentence(f"The round was {h.outcome}" + (f": {h.stop}." if h.stop else "."))
        return answer
    _explain_round_result(run, h, answer)
    return answer


def _explain_round_result(run: RecordedRun, h: RoundRecord, answer: Explanation) -> None:
    peers = max(len(h.replied) - 1, 0)
    what = (
        f"A client's update pulled against {run.count_conflicts(h):.2f} of {peers} peers on average"
    )
    text = what if peers else "One reply came, so that there was nobody for it to pull against"
    if run.psi is not None:
        stands = "at or above" if run.count_conflicts(h) >= run.psi else "below"
        looks = "" if h.exploit else "; the rule looks at exploit rounds only"
        text += f", {stands} the limit psi = {run.psi:g}{looks}"
    answer.add_sentence(
        text + ".", conflicts=run.count_conflicts(h), psi=run.psi, consensus=h.consensus
    )
    if h.last_model_metric is not None:
        averaged = (
            ""
            if h.averaged is None
            else f" ({words.format_metric_value(h.metric, h.averaged)} for the server average)"
        )
        value = (
            f"{words.format_metric_name(h.metric)}"
            f" {words.format_metric_value(h.metric, h.last_model_metric)}{averaged}."
        )
        answer.add_sentence(
            value, **{h.metric.replace("-", "_"): h.last_model_metric, "averaged": h.averaged}
        )
    if h.figures:
        answer.add_sentence(
            f"Figures of the pieces: {format_figures(h.figures)}.", figures=dict(h.figures)
        )
    if h.stop:
        answer.add_sentence(f"The run stopped here: {h.stop}.", stop=h.stop)


def explain_client(run: RecordedRun, client: str, t: int | None = None) -> Explanation:
    """A client's part in the run, or why it was (not) chosen in round t."""
    k, answer = find_client_index(run, client), Explanation()
    if t is not None:
        _explain_client_round(run, k, find_round(run, t), answer)
        _explain_client_figures(run, client, t, answer)
    else:
        _explain_client_overall(run, k, answer)
    _explain_peers(run, k, t, answer)
    return answer


def _explain_client_round(run: RecordedRun, k: int, h: RoundRecord, answer: Explanation) -> None:
    name, before = f"Client {escape_unprintable(run.roster[k])}", compute_scores_before(run, h.t)
    was = run.roster[k] in h.chosen
    answer.add_sentence(
        describe_selection(run, h),
        client=run.roster[k],
        round=h.t,
        chosen=was,
        exploit=h.exploit,
        draw=recover_selection_draw(run, h),
    )
    if before is None or "due" in h.why:
        answer.add_sentence(f"{name} was {'' if was else 'not '}among them.")
    elif h.exploit:
        least = min((before.H[run.client_indices[c]] for c in h.chosen), default=0.0)
        answer.add_sentence(
            f"{name}, by how much it agrees with the others: {before.describe_client(k)}; the last"
            f" one taken had {least:+.2f}, so it was {'' if was else 'not '}chosen.",
            H=float(before.H[k]),
            rank=before.rank[k],
            cut=float(least),
        )
        if not was and before.H[k] > least:
            answer.add_sentence(
                "By that alone it would have been: it was out of reach, or had been chosen too"
                " often of late."
            )
    else:
        answer.add_sentence(
            f"{name} was {'' if was else 'not '}drawn; how much it agrees with the others"
            f" ({before.describe_client(k)}) played no part.",
            H=float(before.H[k]),
            rank=before.rank[k],
        )
    if reason := h.rejected.get(run.roster[k]):
        answer.add_sentence(
            f"Its reply did not count: {escape_unprintable(reason)}.", rejected=reason
        )
    if odd := h.flagged.get(run.roster[k]):
        answer.add_sentence(f"Its update looked odd: {escape_unprintable(odd)}.", flagged=odd)
    if run.roster[k] in h.doubted:
        share = h.doubted[run.roster[k]]
        answer.add_sentence(f"Its reply counted with {share:.2g} of its weight.", doubted=share)


def _explain_client_overall(run: RecordedRun, k: int, answer: Explanation) -> None:
    name = run.roster[k]
    rounds = [h for h in run.rounds if name in h.chosen]
    exploit = sum(h.exploit for h in rounds)
    split = f", {exploit} of them in exploit rounds" if any(h.exploit for h in run.rounds) else ""
    answer.add_sentence(
        f"Client {escape_unprintable(name)} was chosen in {len(rounds)} of {len(run.rounds)}"
        f" rounds{split}" + (f", last in round {rounds[-1].t}." if rounds else "."),
        client=name,
        chosen=[h.t for h in rounds],
        exploited=exploit,
    )
    lost = [(h.t, h.rejected[name]) for h in rounds if name in h.rejected]
    if lost:
        answer.add_sentence(
            f"{len(lost)} replies did not count, last in round {lost[-1][0]}:"
            f" {escape_unprintable(lost[-1][1])}.",
            lost=lost,
        )
    _explain_downweighting(run, name, rounds, answer)
    cost = {key: values[0] for key, values in sum_client_costs(run, [k]).items()}
    answer.add_sentence(
        f"It spent {cost['joules'] + cost['joules_wasted']:.4g} J ({cost['joules_wasted']:.4g}"
        f" wasted) and {(cost['bytes'] + cost['bytes_wasted']) / 1e6:.4g} MB"
        f" ({cost['bytes_wasted'] / 1e6:.4g} wasted).",
        **{key: value for key, value in cost.items() if key != "n"},
    )
    values = run.final.get("clients", [])
    if run.final.get("metric") == "accuracy" and k < len(values) and values[k] is not None:
        known = sorted(value for value in values if value is not None)
        place = known.index(values[k]) + 1
        answer.add_sentence(
            f"The final model gets {100 * values[k]:.1f} % of its hold-out right, rank {place} of"
            f" {len(known)} from below.",
            accuracy=values[k],
        )
    final = compute_scores_before(run, run.rounds[-1].t + 1) if run.rounds else None
    if final is not None:
        told = f"How much it agrees with the others now: {final.describe_client(k)}."
        answer.add_sentence(told, H=float(final.H[k]), rank=final.rank[k])


def _explain_client_figures(run: RecordedRun, client: str, t: int, answer: Explanation) -> None:
    """What pieces reported about a client in round t."""
    lines = [line for line in run.costs if line["t"] == t and line["client"] == client]
    figures = next((line["figures"] for line in reversed(lines) if line.get("figures")), None)
    if figures:
        answer.add_sentence(
            f"Figures of the pieces about it: {format_figures(figures)}.", figures=figures
        )


def _explain_downweighting(
    run: RecordedRun, name: str, rounds: Sequence[RoundRecord], answer: Explanation
) -> None:
    """What was odd about a client's updates, and what became of their weight."""
    odd = [(h.t, h.flagged[name]) for h in rounds if name in h.flagged]
    if odd:
        answer.add_sentence(
            f"{len(odd)} of its updates looked odd, last in round {odd[-1][0]}:"
            f" {escape_unprintable(odd[-1][1])}.",
            odd=odd,
        )
    doubted = [(h.t, h.doubted[name]) for h in rounds if name in h.doubted]
    if doubted:
        came = sum(name in h.replied for h in rounds)
        mean = float(np.mean([share for _, share in doubted]))
        piece = type(run.recipe.aggregator).__name__ if run.recipe else "the aggregator"
        answer.add_sentence(
            f"{len(doubted)} of its {came} replies counted less ({piece}): {mean:.2g} of their"
            f" weight was left on average, {doubted[-1][1]:.2g} in round {doubted[-1][0]}.",
            doubted=doubted,
        )


def _explain_peers(run: RecordedRun, k: int, t: int | None, answer: Explanation) -> None:
    """Who the client agrees and disagrees with most, as known before round t (or at the end)."""
    Omega = rebuild_relationship_map(run, None if t is None else t - 1)
    if Omega is None:
        return
    order = np.argsort(-Omega[k], kind="stable")
    for head, peers in (
        ("agrees", order[:MAX_NAMED_PEERS]),
        ("disagrees", order[::-1][:MAX_NAMED_PEERS]),
    ):
        sign = 1 if head == "agrees" else -1
        named = [(run.roster[j], float(Omega[k, j])) for j in peers if sign * Omega[k, j] > 0]
        if named:
            told = ", ".join(f"{escape_unprintable(name)} ({value:+.2f})" for name, value in named)
            answer.add_sentence(f"It {head} most with {told}.", **{head: named})


def _describe_stop(run: RecordedRun, T: int) -> str:
    """The sentence on a run that a rule ended, before its last round or with it."""
    stop, plain = run.rounds[-1].stop, explain_stop_reason(run)
    told = f"{plain} [{stop}]"
    if get_stop_criterion(run) == "gain":
        told = plain
    elif stop.startswith(plain):
        told = stop
    if len(run.committed_rounds) >= T:
        return (
            f"The run went through all {T} rounds, and its stop rule was met in the last: {told}."
        )
    return f"The run stopped after round {len(run.committed_rounds)} of {T}: {told}."


def explain_run_end(run: RecordedRun) -> Explanation:
    """Why the run ended when it did."""
    answer = Explanation()
    if not run.rounds:
        answer.add_sentence("No round is committed yet.")
        return answer
    _explain_stop(run, answer)
    for rule in run.stop_rules:
        if text := rule.explain(run.committed_rounds):
            answer.add_sentence(text)
    for course in list_courses(run):
        answer.facts[course.name] = course.values[-1]
        answer.facts[course.limit_name] = course.limits[-1]
    _explain_conflict_limit(run, answer)
    _explain_final_model(run, answer)
    for note in collect_run_notes(run):
        answer.add_sentence(f"Note: {note}.")
    return answer


def _explain_stop(run: RecordedRun, answer: Explanation) -> None:
    """Whether a rule ended the run, and how many clients could be reached."""
    stop, rounds, T = run.rounds[-1].stop, len(run.committed_rounds), get_planned_rounds(run)
    if stop:
        text = _describe_stop(run, T)
    elif rounds >= T:
        text = f"No rule stopped the run: it went through all {T} rounds."
    else:
        text = f"The run is unfinished: {rounds} of {T} rounds are committed."
    answer.add_sentence(text, stop=stop, rounds=rounds)
    if reach := describe_reach(run):
        answer.add_sentence(reach)


def _explain_conflict_limit(run: RecordedRun, answer: Explanation) -> None:
    """How near the run came to its limit psi, and where other limits would have ended it."""
    answer.facts.update(psi=run.psi, shadow_stops=run.summary["shadow_stops"])
    if run.psi is None:
        return
    exploits = [h for h in run.committed_rounds if h.exploit]
    if not exploits:
        answer.add_sentence(
            f"The limit psi = {run.psi:g} was never tested: the run had no exploit round."
        )
    else:
        top = max(exploits, key=run.count_conflicts)
        most = run.count_conflicts(top)
        answer.add_sentence(
            f"Its rule stops the run when a chosen client conflicts with psi = {run.psi:g} peers on"
            f" average; the most in {len(exploits)} exploit rounds were {most:.2f}, in round"
            f" {top.t}.",
            most=most,
            most_round=top.t,
            exploit_rounds=len(exploits),
        )
    if firsts := run.summary["shadow_stops"]:
        told = ", ".join(f"{psi} in round {t}" for psi, t in firsts.items())
        answer.add_sentence(f"Other limits psi would have stopped it: {told}.")


def _explain_final_model(run: RecordedRun, answer: Explanation) -> None:
    """The metric of the final model, beside the last one and a constant prediction."""
    end, metric = get_summary_values(run), str(run.summary.get("metric", "accuracy"))
    value, other = end["accuracy"], run.summary.get("value_last", end["accuracy_last"])
    if value is not None:
        last = f" (the last model: {words.format_metric_value(metric, other)})"
        text = (
            f"{words.format_metric_name(metric)} of the final model:"
            f" {words.format_metric_value(metric, value)}"
        )
        text += "" if other in (None, value) else last
        answer.add_sentence(f"{text}.", **{metric.replace("-", "_"): value})
    if figures := run.summary.get("figures"):
        answer.add_sentence(
            f"Figures of the pieces at the end: {format_figures(figures)}.", figures=figures
        )
    if constant := describe_baseline(run):
        answer.add_sentence(f"For comparison: {constant}.")
