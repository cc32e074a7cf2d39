"""Writes the commands that start a run whose ranks may come and go: one for each machine."""

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.ranks.axes import RankError
from truestep.ranks.elastic import MAX_RESTARTS, OWN_STORE, SECONDS_TO_LEAVE, Agent
from truestep.ranks.watch import longest_silence
from truestep.run.assemble.policy import layout_of
from truestep.run.elastic import JOIN_PATIENCE, check_elastic

# Settings of torch's rendezvous, in seconds. Agents wait a week for others; a generation begins this long after the
# least number of agents is there; an agent that is silent for 5 intervals has left.
RENDEZVOUS = {
    "join_timeout": 604800,
    "last_call_timeout": 15,
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 5,
}
_MARGIN = 15.0  # seconds
_THREADS = "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"  # torchrun sets it for several processes of an agent, not for one
# A signal is kept until all agents have started: the shell does not know a process that it has just forked, and that
# process forgets the signals of its first moments.
_NOTE = "told=; trap told=1 TERM INT"
_TELL = "sleep 1; trap 'kill -TERM $pids' TERM INT; [ -z \"$told\" ] || kill -TERM $pids"
# Waits for all agents, also after a signal, which ends a `wait`; the exit code is the greatest of theirs.
_WAIT = (
    "worst=0; for pid in $pids; do "
    "while wait $pid; code=$?; kill -0 $pid 2>/dev/null; do :; done; "
    "[ $code -le $worst ] || worst=$code; done; trap - TERM INT; (exit $worst)"
)


def elastic_commands(
    config: Config, train: Sequence[str], hosts: Sequence[str], gpus: int, least: int | None = None, port: int = 29500
) -> list[str]:
    """Return a shell command for each host, which starts an agent for each GPU, or for each team of GPUs that a layout
    needs together. `train` is the command of a rank, and `least` the fewest agents that the run goes on with."""
    if len(set(hosts)) < len(hosts):
        twice = next(host for host in hosts if hosts.count(host) > 1)
        raise TruestepError(f"--hosts {','.join(hosts)} names a machine twice: name {twice} once")
    team = _team(config, gpus, len(hosts))
    each = gpus // team
    most = each * len(hosts)
    fewest = least or (most + 1) // 2
    if fewest > most:
        raise TruestepError(f"--least: {fewest} is more than the {most} agents of all machines")
    check_elastic(config, Agent(0, fewest, most, team))
    given = RENDEZVOUS | {"read_timeout": read_timeout(most * team, config.schedule.stall_timeout)}
    settings = ",".join(f"{name}={value}" for name, value in given.items())
    name = re.sub(r"[^\w-]", "-", Path(config.checkpoint.directory or "run").name)
    visible = [",".join(str(team * agent + gpu) for gpu in range(team)) for agent in range(each)]
    return [
        f"{_NOTE}; pids=; for gpus in {' '.join(visible)}; do {OWN_STORE}=1 {_THREADS} CUDA_VISIBLE_DEVICES=$gpus "
        f"torchrun --nnodes {fewest}:{most} --nproc-per-node {team} --max-restarts {MAX_RESTARTS} "
        f"--rdzv-id {name} --rdzv-backend c10d --rdzv-endpoint {hosts[0]}:{port} --rdzv-conf {settings} "
        f'--local-addr {host} -m {shlex.join(train)} & pids="$pids $!"; done; {_TELL}; {_WAIT}'
        for host in hosts
    ]


def read_timeout(ranks: int, stall_timeout: float) -> int:
    """Return the seconds that an agent waits for an answer of the rendezvous. One that gets none closes the run for all
    as soon as it can. So its ranks, which hear nothing either, or are not connected, end it before."""
    ranks_wait = max(JOIN_PATIENCE, longest_silence(ranks, stall_timeout))
    return math.ceil(ranks_wait + SECONDS_TO_LEAVE + _MARGIN)


def _team(config: Config, gpus: int, hosts: int) -> int:
    """Return the fewest GPUs that can come and go together."""
    layout = layout_of(config)
    problem: RankError | None = None
    for team in (size for size in range(1, gpus + 1) if gpus % size == 0):
        try:
            for teams in range(1, gpus // team * hosts + 1):
                layout.over(team * teams)
            return team
        except RankError as error:
            problem = error
    raise TruestepError(f"the {gpus} GPUs of a machine make no team that can come and go: {problem}")
