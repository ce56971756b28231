"""The one door between clients and everything else: a reply passes whole, or is that client's
failure with a reason.

Nothing a client sends raises: what is not as the task asked for it is refused, sizes before
contents.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flrce.core.payloads import (
    ReplyContext,
    SentModel,
    TaskLayoutFunction,
    decode_update,
    is_finite_number,
    is_plausible_cost,
    is_plausible_step_count,
    stack_updates,
    validate_extras,
    validate_variances,
)
from flrce.core.pieces import MalformedPayload
from flrce.core.types import Reply, Task, Updates
from flrce.errors import format_one_line

MAX_SAMPLES_PER_CLIENT = 10_000_000  # a client that claims more lies, or should be several clients
# times as many samples as it had before: nobody gathers more between two rounds
MAX_SAMPLE_RATIO = 4
StrayReply = tuple[Reply, str]


def validate_replies(
    tasks: Sequence[Task], replies: Sequence[Reply], context: ReplyContext
) -> tuple[Updates, dict[str, str]]:
    """The updates that passed, ordered by row, and why each other client did not count."""
    asked = {task.client: task for task in tasks}
    first, strays = match_replies(tasks, replies)
    rejected = {task.client: "no reply" for task in tasks if task.client not in first}
    rejected |= {reply.client: why for reply, why in strays if reply.client in rejected}
    passed: dict[str, tuple[Reply, Tensor]] = {}
    for client, why, update in _check_each_reply(asked, first, context):
        if update is None:
            rejected[client] = why
        else:
            passed[client] = (first[client], update)
        del update  # it may be large
    for client in _find_slow_clients(passed, context.keep):
        del passed[client]
        rejected[client] = "slower than the replies that were waited for"
    counted = sorted((asked[client] for client in passed), key=lambda task: task.k)
    # each may be a large model, let go of as it is stacked
    handed_over = [passed.pop(task.client) for task in counted]
    return _add_bases(stack_updates(counted, handed_over, context), counted, context), rejected


def _check_each_reply(
    asked: Mapping[str, Task], replies: Mapping[str, Reply], context: ReplyContext
) -> Iterator[tuple[str, str, Tensor | None]]:
    """(client, "", its update), or (client, why not, None)."""
    w = context.w
    now = None if w is None else SentModel(w)
    started = {k: now if base is w else SentModel(base) for k, base in context.bases.items()}
    for client, reply in replies.items():
        task, base = asked[client], started.get(client, now)
        why, u = validate_reply(task, reply, context.layout, base, now, context.trainable)
        why = why if u is None else _explain_old_or_grown(task, reply, context)
        yield client, why, None if why else u
        del u


def _explain_old_or_grown(task: Task, reply: Reply, context: ReplyContext) -> str:
    """Why a well-formed reply does not count: too old, or from a client that claims to have grown
    too much; "" if it counts.
    """
    counts, age = context.samples_before, context.get_age(task)
    samples_before = 0 if counts is None or task.k >= len(counts) else int(counts[task.k])
    if context.oldest is not None and age > context.oldest:
        return f"late: {age} rounds old"
    if 0 < MAX_SAMPLE_RATIO * samples_before < reply.n:
        return (
            f"num_examples grew from {samples_before} to {reply.n}, more than"
            f" {MAX_SAMPLE_RATIO} times"
        )
    return ""


def _add_bases(updates: Updates, tasks: Sequence[Task], context: ReplyContext) -> Updates:
    """The updates with the models that they started from and their ages, where not this round's."""
    w = context.w
    if w is None:
        return updates
    ages = [context.get_age(task) for task in tasks]
    started = tuple(context.bases.get(task.client, w) for task in tasks)
    if not (any(ages) or any(base is not w for base in started)):
        return updates
    return replace(updates, base=started, age=torch.tensor(ages) if any(ages) else None)


def match_replies(
    tasks: Sequence[Task], replies: Sequence[Reply]
) -> tuple[dict[str, Reply], list[StrayReply]]:
    """Each asked client's first reply to this round, and all others with the reason: late,
    duplicate, or unasked.
    """
    asked = {task.client: task.t for task in tasks}
    first: dict[str, Reply] = {}
    strays: list[StrayReply] = []
    for reply in replies:
        if not isinstance(reply, Reply) or type(reply.client) is not str:
            continue  # nothing to hold anybody to
        if reply.client not in asked:
            is_late = any(type(reply.t) is int and reply.t < t for t in asked.values())
            strays.append(
                (
                    reply,
                    f"late: reply to round {format_one_line(reply.t, 20)}"
                    if is_late
                    else "nobody asked",
                )
            )
        elif type(reply.t) is not int or reply.t != asked[reply.client]:
            late = f"late: reply to round {format_one_line(reply.t, 20)} in round"
            strays.append((reply, f"{late} {asked[reply.client]}"))
        elif reply.client in first:
            strays.append((reply, "duplicate"))
        else:
            first[reply.client] = reply
    return first, strays


def format_rejections(rejected: Mapping[str, str]) -> str:
    """Why nobody counted, in one line."""
    return (
        "; ".join(f"{client}: {why}" for client, why in sorted(rejected.items())[:3])
        or "nobody was chosen, or nobody is reachable"
    )


def validate_reply(
    task: Task,
    reply: Reply,
    layout_of: TaskLayoutFunction,
    base: SentModel | None = None,
    now: SentModel | None = None,
    trainable: int = 0,
) -> tuple[str, Tensor | None]:
    """("", the decoded update), or (why not, None). It started from `base` and is added to `now`,
    if another.
    """
    why = explain_bad_figures(task, reply, base)
    return (
        (why, None) if why else _decode_reply(task, reply, layout_of, base, now or base, trainable)
    )


def explain_bad_figures(task: Task, reply: Reply, base: SentModel | None) -> str:
    """Why a reply does not count, by all that it says beside its tensors; "" if it may."""
    if reply.error or reply.payload is None:
        return format_one_line(reply.error or "") or "empty reply"
    if type(reply.t) is not int or reply.t != task.t:
        return f"late: reply to round {format_one_line(reply.t, 20)} in round {task.t}"
    if type(reply.base) is not str or (base and reply.base and reply.base != base.digest):
        return f"trained from another model: {format_one_line(reply.base, 40)!r}"
    if type(reply.n) is not int or not 1 <= reply.n <= MAX_SAMPLES_PER_CLIENT:
        claim = f"num_examples {format_one_line(reply.n, 20)!r}"
        return f"{claim} is not an integer from 1 to {MAX_SAMPLES_PER_CLIENT}"
    if not is_plausible_step_count(task, reply.n, reply.steps):
        return f"malformed: {format_one_line(reply.steps, 20)!r} steps, more than its task has"
    if not is_plausible_cost(reply.spent):
        return "malformed: costs must be finite numbers of at least 0 that a device can reach"
    if not (is_finite_number(reply.loss) and is_finite_number(reply.loss_square)):
        loss, square = _format_number(reply.loss), _format_number(reply.loss_square)
        return f"malformed: loss {loss}, squared {square}"
    if not reply.spent.seconds <= task.deadline:
        return f"late: {reply.spent.seconds:.3g} s, past the deadline of {task.deadline:.3g} s"
    return ""


def _decode_reply(
    task: Task,
    reply: Reply,
    layout_of: TaskLayoutFunction,
    base: SentModel | None,
    now: SentModel | None,
    trainable: int,
) -> tuple[str, Tensor | None]:
    assert reply.payload is not None
    try:
        held, layout = layout_of(task)
        validate_extras(task, reply.extras, trainable)
        why, u = decode_update(task, reply.payload, layout)
        if u is None or now is None:
            return why, u
        exact = base is now and (task.compressor is None or task.compressor.is_dense)
        return validate_variances(u, now.w, held, layout, exact)
    except MalformedPayload as why:
        return f"malformed: {format_one_line(why)}", None
    except Exception as why:  # a decoder, perhaps a user's, met bytes it did not expect
        return f"malformed: {type(why).__name__} while decoding", None


def _find_slow_clients(passed: dict[str, tuple[Reply, Tensor]], keep: int | None) -> list[str]:
    """Clients beyond the `keep` fastest; ties by name."""
    if not keep:
        return []
    return sorted(passed, key=lambda client: (passed[client][0].spent.seconds, client))[keep:]


def _format_number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else format_one_line(value, 20)
