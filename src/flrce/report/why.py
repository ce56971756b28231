"""Explain a round, a client or the end of a run, in sentences with numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flrce.core.cost_table import is_energy_known
from flrce.core.metric_format import format_metric_name, format_metric_value
from flrce.core.record import format_figures
from flrce.core.types import RoundRecord
from flrce.errors import BadInput, suggest_name
from flrce.report.cost_per_point import list_courses
from flrce.report.endings import describe_stop, get_planned_rounds
from flrce.report.run_detail import rebuild_relationship_map, sum_client_costs
from flrce.report.selection import (
    compute_scores_before,
    describe_reach,
    describe_selection,
    recover_selection_draw,
)
from flrce.report.tables import get_summary_values
from flrce.report.verdict import collect_run_notes, describe_baseline
from flrce.storage.read import RecordedRun

MAX_NAMED_PEERS = 3  # peers that agree most, and that disagree most


@dataclass(frozen=True)
class Explanation:
    """Sentences for a person, and the same facts for a program."""

    sentences: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    def add_sentence(self, sentence: str, **facts: object) -> None:
        self.sentences.append(sentence)
        self.facts.update(facts)


def escape_unprintable(name: str) -> str:
    """Replace control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name)


def find_round(run: RecordedRun, t: int) -> RoundRecord:
    """Round t, as it was committed or last tried."""
    tries = [h for h in run.rounds if h.t == t]
    if not tries:
        remedy = f"use 1 to {run.rounds[-1].t}" if run.rounds else "it has no round yet"
        raise BadInput(f"--round {t} is not in {run.folder}: {remedy}")
    return tries[-1]


def find_client_index(run: RecordedRun, client: str) -> int:
    if client not in run.client_indices:
        remedy = suggest_name(client, map(escape_unprintable, run.roster[:200]))
        raise BadInput(f"--client {client!r} is not in {run.folder}: {remedy}")
    return run.client_indices[client]


def explain_round(run: RecordedRun, t: int) -> Explanation:
    """How round t selected clients, what came back, and what it changed."""
    h, answer = find_round(run, t), Explanation()
    draw = recover_selection_draw(run, h)
    facts = {"round": t, "exploit": h.exploit, "draw": draw, "outcome": h.outcome, **h.why}
    answer.add_sentence(describe_selection(run, h), **facts)
    _list_chosen_clients(run, h, answer)
    for head, key in (("Rejected", "rejected"), ("Accepted, but flagged", "flagged")):
        reasons: Mapping[str, str] = getattr(h, key)
        if reasons:
            listed = "; ".join(f"{client}: {reason}" for client, reason in reasons.items())
            answer.add_sentence(f"{head}: {escape_unprintable(listed)}.", **{key: dict(reasons)})
    if h.doubted:
        listed = ", ".join(f"{client} ({share:.2g})" for client, share in h.doubted.items())
        answer.add_sentence(
            f"Given less weight (share that is left): {escape_unprintable(listed)}.",
            doubted=dict(h.doubted),
        )
    if h.outcome == "committed":
        _explain_round_result(run, h, answer)
    else:
        answer.add_sentence(f"The round was {h.outcome}" + (f": {h.stop}." if h.stop else "."))
    return answer


def _list_chosen_clients(run: RecordedRun, h: RoundRecord, answer: Explanation) -> None:
    scores = None if "due" in h.why else compute_scores_before(run, h.t)
    texts: list[str] = []
    facts: list[dict[str, Any]] = []
    for client in h.chosen:
        k, text = run.client_indices[client], escape_unprintable(client)
        facts.append({"client": client})
        if scores is not None:
            facts[-1] |= {"H": float(scores.H[k]), "rank": scores.rank[k]}
            text += f" ({scores.describe_client(k)})"
        texts.append(text)
    if texts:
        head = "Selected" if scores is None else "Selected, with their agreement with the others"
        answer.add_sentence(f"{head}: {', '.join(texts)}.", chosen=facts)


def _explain_round_result(run: RecordedRun, h: RoundRecord, answer: Explanation) -> None:
    peers, conflicts = max(len(h.replied) - 1, 0), run.count_conflicts(h)
    text = f"On average, a client's update conflicted with {conflicts:.2f} of {peers} peers"
    if not peers:
        text = "Only one reply arrived, so there were no peers to conflict with"
    if run.psi is not None:
        side = "at or above" if conflicts >= run.psi else "below"
        checked = "" if h.exploit else "; the rule checks exploit rounds only"
        text += f", {side} the limit psi = {run.psi:g}{checked}"
    answer.add_sentence(f"{text}.", conflicts=conflicts, psi=run.psi, consensus=h.consensus)
    if h.last_model_metric is not None:
        text = (
            f"{format_metric_name(h.metric)} {format_metric_value(h.metric, h.last_model_metric)}"
        )
        if h.averaged is not None:
            text += f" ({format_metric_value(h.metric, h.averaged)} for the server average)"
        values = {h.metric.replace("-", "_"): h.last_model_metric, "averaged": h.averaged}
        answer.add_sentence(f"{text}.", **values)
    _add_figures(answer, "Figures of the pieces", h.figures)
    if h.stop:
        answer.add_sentence(f"The run stopped here: {h.stop}.", stop=h.stop)


def _add_figures(answer: Explanation, head: str, figures: Mapping[str, float] | None) -> None:
    if figures:
        answer.add_sentence(f"{head}: {format_figures(figures)}.", figures=dict(figures))


def explain_client(run: RecordedRun, client: str, t: int | None = None) -> Explanation:
    """A client's part in the run, or why it was (not) selected in round t."""
    k, answer = find_client_index(run, client), Explanation()
    if t is None:
        _explain_client_overall(run, k, answer)
    else:
        _explain_client_round(run, k, find_round(run, t), answer)
        lines = [line for line in run.costs if line["t"] == t and line["client"] == client]
        figures = (line["figures"] for line in reversed(lines) if line.get("figures"))
        _add_figures(answer, "Figures of the pieces on this client", next(figures, None))
    _explain_peers(run, k, t, answer)
    return answer


def _explain_client_round(run: RecordedRun, k: int, h: RoundRecord, answer: Explanation) -> None:
    client = run.roster[k]
    facts: dict[str, Any] = {"client": client, "round": h.t, "chosen": client in h.chosen}
    facts |= {"exploit": h.exploit, "draw": recover_selection_draw(run, h)}
    answer.add_sentence(describe_selection(run, h), **facts)
    _explain_client_selection(run, k, h, answer)
    if reason := h.rejected.get(client):
        answer.add_sentence(
            f"Its reply was rejected: {escape_unprintable(reason)}.", rejected=reason
        )
    if reason := h.flagged.get(client):
        answer.add_sentence(
            f"Its update was flagged: {escape_unprintable(reason)}.", flagged=reason
        )
    if (share := h.doubted.get(client)) is not None:
        answer.add_sentence(f"Its reply kept {share:.2g} of its weight.", doubted=share)


def _explain_client_selection(
    run: RecordedRun, k: int, h: RoundRecord, answer: Explanation
) -> None:
    name, scores = f"Client {escape_unprintable(run.roster[k])}", compute_scores_before(run, h.t)
    chosen = run.roster[k] in h.chosen
    was = "was" if chosen else "was not"
    if scores is None or "due" in h.why:
        answer.add_sentence(f"{name} {was} among them.")
        return
    agreement = scores.describe_client(k)
    answer.facts.update(H=float(scores.H[k]), rank=scores.rank[k])
    if not h.exploit:
        answer.add_sentence(
            f"{name} {was} drawn; its agreement with the others ({agreement}) was not considered."
        )
        return
    lowest = min((float(scores.H[run.client_indices[c]]) for c in h.chosen), default=0.0)
    answer.add_sentence(
        f"{name} {was} selected: its agreement with the others was {agreement}; the lowest"
        f" of the selected clients was {lowest:+.2f}.",
        cut=lowest,
    )
    if not chosen and scores.H[k] > lowest:
        answer.add_sentence(
            "Its agreement was high enough, but it could not be reached or had been selected too"
            " often recently."
        )


def _explain_client_overall(run: RecordedRun, k: int, answer: Explanation) -> None:
    client = run.roster[k]
    rounds = [h for h in run.rounds if client in h.chosen]
    exploits = sum(h.exploit for h in rounds)
    text = (
        f"Client {escape_unprintable(client)} was selected in {len(rounds)} of {len(run.rounds)}"
        " rounds"
    )
    if any(h.exploit for h in run.rounds):
        text += f", {exploits} of them exploit rounds"
    if rounds:
        text += f", last in round {rounds[-1].t}"
    selected = [h.t for h in rounds]
    answer.add_sentence(f"{text}.", client=client, chosen=selected, exploited=exploits)
    rejected = [(h.t, h.rejected[client]) for h in rounds if client in h.rejected]
    _add_last_reason(answer, "of its replies were rejected", "lost", rejected)
    flagged = [(h.t, h.flagged[client]) for h in rounds if client in h.flagged]
    _add_last_reason(answer, "of its updates were flagged", "odd", flagged)
    _explain_downweighting(run, client, rounds, answer)
    costs = {key: values[0] for key, values in sum_client_costs(run, [k]).items()}
    del costs["n"]
    joules, wasted = costs["joules"], costs["joules_wasted"]
    energy = f"{joules + wasted:.4g} J ({wasted:.4g} J wasted)"
    answer.add_sentence(
        f"It spent {energy if is_energy_known(run.rounds) else 'an unknown amount of energy'} and"
        f" {(costs['bytes'] + costs['bytes_wasted']) / 1e6:.4g} MB"
        f" ({costs['bytes_wasted'] / 1e6:.4g} MB wasted).",
        **costs,
    )
    _explain_hold_out(run, k, answer)
    scores = compute_scores_before(run, run.rounds[-1].t + 1) if run.rounds else None
    if scores is not None:
        answer.add_sentence(
            f"Its agreement with the others at the end: {scores.describe_client(k)}.",
            H=float(scores.H[k]),
            rank=scores.rank[k],
        )


def _add_last_reason(
    answer: Explanation, text: str, fact: str, reasons: list[tuple[int, str]]
) -> None:
    if reasons:
        t, reason = reasons[-1]
        sentence = f"{len(reasons)} {text}, last in round {t}: {escape_unprintable(reason)}."
        answer.add_sentence(sentence, **{fact: reasons})


def _explain_downweighting(
    run: RecordedRun, client: str, rounds: Iterable[RoundRecord], answer: Explanation
) -> None:
    accepted = [h for h in rounds if client in h.replied]
    shares = [(h.t, h.doubted[client]) for h in rounds if client in h.doubted]
    if not shares:
        return
    mean = float(np.mean([share for _, share in shares]))
    aggregator = type(run.recipe.aggregator).__name__ if run.recipe else "the aggregator"
    answer.add_sentence(
        f"{aggregator} gave less weight to {len(shares)} of its {len(accepted)} replies: on average"
        f" {mean:.2g} of the weight was left, {shares[-1][1]:.2g} in round {shares[-1][0]}.",
        doubted=shares,
    )


def _explain_hold_out(run: RecordedRun, k: int, answer: Explanation) -> None:
    values = run.final.get("clients", [])
    if run.final.get("metric") != "accuracy" or k >= len(values) or values[k] is None:
        return
    ranked = sorted((value for value in values if value is not None), reverse=True)
    answer.add_sentence(
        f"Accuracy of the final model on its hold-out: {100 * values[k]:.1f} %, rank"
        f" {ranked.index(values[k]) + 1} of {len(ranked)}.",
        accuracy=values[k],
    )


def _explain_peers(run: RecordedRun, k: int, t: int | None, answer: Explanation) -> None:
    """The peers that the client agrees and disagrees with most, before round t or at the end."""
    Omega = rebuild_relationship_map(run, None if t is None else t - 1)
    if Omega is None:
        return
    order = np.argsort(-Omega[k], kind="stable")
    for verb, sign, peers in (("agrees", 1, order), ("disagrees", -1, order[::-1])):
        nearest = peers[:MAX_NAMED_PEERS]
        named = [(run.roster[j], float(Omega[k, j])) for j in nearest if sign * Omega[k, j] > 0]
        if named:
            listed = ", ".join(f"{escape_unprintable(n)} ({value:+.2f})" for n, value in named)
            answer.add_sentence(f"It {verb} most with {listed}.", **{verb: named})


def explain_run_end(run: RecordedRun) -> Explanation:
    """Why the run ended when it did."""
    answer = Explanation()
    if not run.rounds:
        answer.add_sentence("No round is committed yet.")
        return answer
    stop, rounds = run.rounds[-1].stop, len(run.committed_rounds)
    answer.add_sentence(_describe_run_end(run), stop=stop, rounds=rounds)
    if reach := describe_reach(run):
        answer.add_sentence(reach)
    for rule in run.stop_rules:
        text = rule.explain(run.committed_rounds)
        repeated = stop and text == f"The stop rule ({rule.piece}) says: {stop}."
        if text and not repeated:
            answer.add_sentence(text)
    for course in list_courses(run):
        answer.facts[course.name] = course.values[-1]
        answer.facts[course.limit_name] = course.limits[-1]
    _explain_conflict_limit(run, answer)
    _explain_final_model(run, answer)
    for note in collect_run_notes(run):
        answer.add_sentence(f"Note: {note}.")
    return answer


def _describe_run_end(run: RecordedRun) -> str:
    rounds, T = len(run.committed_rounds), get_planned_rounds(run)
    if not run.rounds[-1].stop:
        if rounds >= T:
            return f"No rule stopped the run: it completed all {T} rounds."
        return f"The run is unfinished: {rounds} of {T} rounds are committed."
    if rounds >= T:
        return (
            f"The run completed all {T} rounds; its stop rule was met in the last round:"
            f" {describe_stop(run)}."
        )
    return f"The run stopped after round {rounds} of {T}: {describe_stop(run)}."


def _explain_conflict_limit(run: RecordedRun, answer: Explanation) -> None:
    """How close the run came to its limit psi, and where other limits would have ended it."""
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
        conflicts = run.count_conflicts(top)
        answer.add_sentence(
            f"Its rule stops the run when a selected client conflicts with psi = {run.psi:g} peers"
            f" on average; the maximum over {len(exploits)} exploit rounds was {conflicts:.2f}, in"
            f" round {top.t}.",
            most=conflicts,
            most_round=top.t,
            exploit_rounds=len(exploits),
        )
    if stops := run.summary["shadow_stops"]:
        listed = ", ".join(f"{psi} in round {t}" for psi, t in stops.items())
        answer.add_sentence(f"Other limits psi would have stopped it: {listed}.")


def _explain_final_model(run: RecordedRun, answer: Explanation) -> None:
    """The metric of the final model, of the last one, and of a constant prediction."""
    values, metric = get_summary_values(run), str(run.summary.get("metric", "accuracy"))
    final = values["accuracy"]
    last = run.summary.get("value_last", values["accuracy_last"])
    if final is not None:
        text = (
            f"{format_metric_name(metric)} of the final model: {format_metric_value(metric, final)}"
        )
        if last not in (None, final):
            text += f" (last model: {format_metric_value(metric, last)})"
        answer.add_sentence(f"{text}.", **{metric.replace("-", "_"): final})
    _add_figures(answer, "Figures of the pieces at the end", run.summary.get("figures"))
    if baseline := describe_baseline(run):
        answer.add_sentence(f"For comparison: {baseline}.")
