"""The one door between clients and everything else: a reply passes whole, or is that client's
failure with a reason.

Nothing a client sends raises: what is not as the task asked for it is refused, sizes before
contents.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flrce.core.payloads import (
    SentModel,
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
TaskLayoutFunction = Callable[[Task], tuple[Tensor | None, Sequence[tuple[str, int]]]]
StrayReply = tuple[Reply, str]


def validate_replies(
    tasks: Sequence[Task],
    replies: Sequence[Reply],
    holdings: TaskLayoutFunction,
    d: int,
    trainable: int,
    keep: int | None = None,
    w: Tensor | None = None,
    known: Tensor | None = None,
    bases: Mapping[str, Tensor] = {},
    t: int | None = None,
    oldest: int | None = None,
    table: Tensor | None = None,
) -> tuple[Updates, dict[str, str]]:
    """The updates that passed, ordered by row, and why each other client did not count.

    w is the model now, and what clients start from where `bases` has no older one; `known` (M,) the
    samples that they had before, 0 where nobody knows. In round t, replies more than `oldest`
    rounds old do not count. `table` is as in Arrivals; where updates lie on a device, w is there
    too.
    """
    asked = {task.client: task for task in tasks}
    now = None if w is None else SentModel(w)
    sent = {client: now if base is w else SentModel(base) for client, base in bases.items()}
    first, strays = match_replies(tasks, replies)
    rejected = {task.client: "no reply" for task in tasks if task.client not in first}
    rejected |= {reply.client: why for reply, why in strays if reply.client in rejected}
    passed: dict[str, tuple[Reply, Tensor]] = {}
    for client, reply in first.items():
        task = asked[client]
        why, u = validate_reply(task, reply, holdings, sent.get(client, now), now, trainable)
        why = why if u is None else _explain_old_or_grown(task, reply, known, t, oldest)
        if u is None or why:
            rejected[client] = why
        else:
            passed[client] = (reply, u)
    for client in _find_slow_clients(passed, keep):
        del passed[client]
        rejected[client] = "slower than the replies that were waited for"
    counted = sorted((asked[client] for client in passed), key=lambda task: task.k)
    dtype = torch.float32 if w is None else w.dtype
    # each may be a large model, let go of as it is stacked
    handed_over = [passed.pop(task.client) for task in counted]
    updates = stack_updates(counted, handed_over, holdings, d, trainable, dtype, table, w)
    return _add_bases(updates, counted, bases, w, t), rejected


def _explain_old_or_grown(
    task: Task, reply: Reply, known: Tensor | None, t: int | None, oldest: int | None
) -> str:
    """Why a well-formed reply does not count: too old, or from a client that claims to have grown
    too much; "" if it counts.
    """
    age = 0 if t is None else t - task.t
    samples_before = 0 if known is None or task.k >= len(known) else int(known[task.k])
    if oldest is not None and age > oldest:
        return f"late: {age} rounds old"
    if 0 < MAX_SAMPLE_RATIO * samples_before < reply.n:
        return (
            f"num_examples grew from {samples_before} to {reply.n}, more than"
            f" {MAX_SAMPLE_RATIO} times"
        )
    return ""


def _add_bases(
    updates: Updates,
    tasks: Sequence[Task],
    bases: Mapping[str, Tensor],
    w: Tensor | None,
    t: int | None,
) -> Updates:
    """The updates with the models that they started from and their ages, where not this round's."""
    ages = [0 if t is None else t - task.t for task in tasks]
    started = tuple(bases.get(task.client, w) for task in tasks)
    if w is None or not (any(ages) or any(base is not w for base in started)):
        return updates
    starts = tuple(w if base is None else base for base in started)
    return replace(updates, base=starts, age=torch.tensor(ages) if any(ages) else None)


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
            known = any(type(reply.t) is int and reply.t < t for t in asked.values())
            strays.append(
                (
                    reply,
                    f"late: reply to round {format_one_line(reply.t, 20)}"
                    if known
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
    holdings: TaskLayoutFunction,
    base: SentModel | None = None,
    now: SentModel | None = None,
    trainable: int = 0,
) -> tuple[str, Tensor | None]:
    """("", the decoded update), or (why not, None). It started from `base` and is added to `now`,
    if another.
    """
    why = explain_bad_figures(task, reply, base)
    return (
        (why, None) if why else _decode_reply(task, reply, holdings, base, now or base, trainable)
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
    holdings: TaskLayoutFunction,
    base: SentModel | None,
    now: SentModel | None,
    trainable: int,
) -> tuple[str, Tensor | None]:
    assert reply.payload is not None
    try:
        held, layout = holdings(task)
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
