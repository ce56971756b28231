"""flrce why runs/a --round 12 --client 7"""

import json
from pathlib import Path

from flrce.errors import BadInput
from flrce.report.why import explain_client, explain_round, explain_run_end
from flrce.storage import read


def explain_run(run: Path, t: int | None, client: str | None, stop: bool, as_json: bool) -> None:
    """Say in sentences why a round, a client or the end of a run came out as it did."""
    if stop and (t is not None or client is not None):
        raise BadInput("--stop is about the whole run; drop --round and --client, or ask twice")
    recorded = read.read_single_run(run)
    with read.explain_damaged_runs([recorded]):
        if client is not None:
            answer = explain_client(recorded, client, t)
        elif t is not None:
            answer = explain_round(recorded, t)
        else:
            answer = explain_run_end(recorded)
    if as_json:
        print(json.dumps({"sentences": answer.sentences, **answer.facts}, indent=1))
    else:
        print("\n".join(answer.sentences))
