"""SIGKILL in the middle of a publication, then a restart: bitwise the run that was never killed.

The server draws each completion by its prompt and its number in the group, so that the same weights make the same ones.
"""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import latest
from ranks.cases import on_ranks, train_all
from ranks.saving import train_until_killed
from server.fake_vllm import FakeVllm
from server.linked_server import BY_LINK, FakeLinked
from server.models import make_model as make_served_model
from server.runs import server_config
from server.sglang_server import serving
from server.vllm_server import NAME
from small_runs import file_hashes, read_lines, without_times
from truestep.ranks.axes import RankError
from truestep.run.checkpoint.comparison import find_damage
from truestep.run.checkpoint.store import CheckpointStore

GROUPS = 4  # of weights that are published together: two layers, the embedding, the norm
# When: at which call, counted over the publications of a process. The second one is that of new weights.
SENT = {"gathering": GROUPS + 3, "adding": GROUPS + 3, "shown": 2, "sent": 2}
DISK = {"gathering": GROUPS + 2, "named": 2}
OF_ANY = ("gathering",)  # what every rank does

# Many minutes beside other work: `short` is a sample of them.
ASKED_FOR = (
    pytest.mark.long,
    pytest.mark.skipif("TRUESTEP_ALL_KILLS" not in os.environ, reason="many minutes: set TRUESTEP_ALL_KILLS"),
)
CASES = [
    pytest.param(1, {}, "nccl", ["adding", "sent"], id="short"),
    pytest.param(1, {}, "nccl", [*SENT], id="one", marks=ASKED_FOR),
    pytest.param(1, {}, "disk", [*DISK], id="disk", marks=ASKED_FOR),
    pytest.param(2, {}, "nccl", [*SENT], id="sharded", marks=ASKED_FOR),
    pytest.param(2, {"pipeline": 2}, "disk", [*DISK], id="pipeline", marks=ASKED_FOR),
    pytest.param(4, {"tensor": 2}, "nccl", ["gathering", *SENT], id="four", marks=ASKED_FOR),
]


def draws_of(body: dict[str, Any]) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr((body["input_ids"], body.get("number"))).encode()))


@pytest.mark.parametrize(("size", "parallel", "transfer", "moments"), CASES)
@pytest.mark.long
def test_kills_in_the_middle_of_publications_change_nothing(
    size: int, parallel: dict[str, int], transfer: str, moments: list[str], tmp_path: Path
) -> None:
    fake = (FakeLinked if transfer == "nccl" else FakeVllm)(make_served_model(tmp_path / "served", seed=2), NAME)
    fake.draws_of = draws_of
    draw = random.Random(f"{size} {parallel} {transfer}")
    with serving(fake) as url:

        def given(name: str) -> dict[str, Any]:
            changes = {
                "parallel": parallel,
                "deterministic": True,
                "sampler": {"max_new_tokens": 8} | (BY_LINK if transfer == "nccl" else {}),
                "checkpoint": {"directory": str(tmp_path / name), "every": 1, "keep": 1},
                "schedule": {"stall_timeout": 30},
                "logging": {"console": False},
            }
            return server_config(tmp_path, [url], **changes).model_dump(mode="json", exclude_unset=True)

        on_ranks(size, train_all, [given("whole")])
        checkpoints = CheckpointStore(tmp_path / "killed" / "checkpoints", 1)
        for moment in moments:
            rank = draw.randrange(size) if moment in OF_ANY else 0
            number = (SENT if transfer == "nccl" else DISK)[moment]
            with pytest.raises(RankError, match="-9"):
                on_ranks(size, train_until_killed, given("killed"), moment, rank, number)
            assert all(find_damage(checkpoint) is None for checkpoint in checkpoints.complete()), moment
        on_ranks(size, train_all, [given("killed")])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert file_hashes(latest(killed)) == file_hashes(latest(whole))
    assert (killed / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    lines = [without_times(read_lines(run / "metrics.jsonl")) for run in (killed, whole)]
    assert lines[0] == lines[1] and len(lines[0]) == 4
