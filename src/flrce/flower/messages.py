"""Messages over a grid, and their answers as they come; nobody waits longer than it wants to."""

import gc
import time
from collections.abc import Collection, Iterator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from flrce.errors import format_one_line
from flrce.flower.versions import explain_legacy_client

POLL_DELAY_RATIO = 0.02  # share of the time waited so far by which an answer may be noticed late
MAX_POLL_SECONDS = 1.0  # seconds between two looks for answers, at most
MAX_FETCHED_ANSWERS = 1000  # answers fetched together where their size is no matter
MAX_LARGE_ANSWERS = 8  # and where it is so large that they are cleared away at once
# the message that it answers, the reply, seconds since that was sent
TimedReply = tuple[str, Message, float]


class MessageQueue:
    """Messages that were sent and not yet answered.

    At most `batch` answers are fetched at once: large models would not fit into memory many times
    over. Whoever reads one should let go of it before asking for the next.
    """

    def __init__(self, grid: Grid, batch: int = MAX_FETCHED_ANSWERS) -> None:
        self.grid, self.batch = grid, max(1, min(batch, MAX_FETCHED_ANSWERS))
        self.sent: dict[str, float] = {}  # message -> when it was sent
        self.here: list[Message] = []  # fetched, and nobody has read them yet

    def send(self, messages: Sequence[Message]) -> list[str]:
        """The messages' ids; "" for one that could not be sent."""
        now = time.monotonic()
        ids = [key or "" for key in self.grid.push_messages(messages)] if messages else []
        self.sent |= {key: now for key in ids if key}
        return ids

    def forget_message(self, key: str) -> None:
        """Ask no more for this answer."""
        self.sent.pop(key, None)

    def iter_answers(
        self, wanted: Collection[str], until: float, along: Collection[str] = ()
    ) -> Iterator[TimedReply]:
        """What comes, until all that is `wanted` is here or the clock says so; what comes `along`
        is not waited for.

        An answer counts only if it is to a message of this post. Whoever breaks off loses none of
        them.
        """
        begun = time.monotonic()
        missing, others = set(wanted) & self.sent.keys(), set(along) & self.sent.keys()
        while missing and (self.here or time.monotonic() < until):
            looked, before = time.monotonic(), len(missing)
            here = {reply.metadata.reply_to_message_id for reply in self.here}
            # the oldest first
            under_way = [key for key in self.sent if key in missing | others and key not in here]
            for keys in _split_batches(under_way, self.batch) or [[]]:
                self.here += self.grid.pull_messages(keys) if keys else []
                large = bool(self.here) and self.batch <= MAX_LARGE_ANSWERS
                while self.here:
                    reply = self.here.pop(0)
                    key = reply.metadata.reply_to_message_id
                    sent = self.sent.pop(key, None)
                    if sent is not None:
                        missing.discard(key)
                        others.discard(key)
                        yield key, reply, time.monotonic() - sent
                    del reply
                if large:
                    # Flower's records refer to one another in circles, and these are large and
                    # young
                    gc.collect(1)
            if len(missing) == before:
                now = time.monotonic()
                pause = max(
                    min(POLL_DELAY_RATIO * (now - begun), MAX_POLL_SECONDS, until - now), 0.001
                )
                # some grids have waited long enough themselves
                time.sleep(max(looked + pause - now, 0))


def _split_batches(keys: Sequence[str], count: int) -> list[Sequence[str]]:
    """So many at a time."""
    return [keys[first : first + count] for first in range(0, len(keys), count)]


def explain_failure(message: Message) -> str:
    """A failed reply's reason in one line."""
    lines = (message.error.reason or "").strip().splitlines()
    reason = format_one_line(lines[-1], 200) if lines else "no reason given"
    return f"failed (code {message.error.code}): {explain_legacy_client(reason) or reason}"
