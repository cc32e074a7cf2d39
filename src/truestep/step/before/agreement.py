"""The verdict on a sampler's log-probs: are they those of the policy, as near as the run's numerics can tell?

Each test has a bound on its chance to accuse an honest sampler, `ALPHA` for all tests of a step together
(docs/sampling.md has the table). Everything is a function of sums that all ranks have, so all come to the same verdict.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from truestep.losses.agreement import COLUMN, COLUMNS, LEVELS
from truestep.types import Rollout

ALPHA = 1e-12
_KEPT = 0.9  # of a server's evidence, from a step to the next
_SELECTED = 3.0  # nats: an older document may have been chosen for its reward or its length
_MOST_IN_ALL = 1.02  # that probabilities may add up to
_ENTROPY_SLACK = 0.02  # of the entropy: draws of another arithmetic may be more likely by so much
_TAIL = 12.0  # nats behind the uniform probability; what is less likely adds next to nothing to a variance
_ENDLESS = 1e6
_BETS = ("up", "down", "older_up")
_HERE = "the sampler"
_BEYOND = [COLUMN[f"beyond_{level:g}"] for level, _ in LEVELS]
_SHOWS = [*_BEYOND, *(COLUMN[name] for name in _BETS)]
_RATES = np.array([rate for _, rate in LEVELS])


@dataclass(frozen=True)
class Fault:
    """A sampler whose tokens are not draws of the policy with the log-probs that it names."""

    server: str
    places: tuple[int, ...]  # of its documents in the plan, those that show the fault most first
    problem: str
    of_draws: bool = False  # its log-probs are right, and its draws are not


def server_of(document: Rollout) -> str:
    return str(document.metadata.get("server", _HERE))


@dataclass
class Judge:
    tolerance: float  # nats, of sampler.tolerance
    vocabulary_size: int
    draws: bool = True  # completions are not chosen by what was drawn, so their probabilities can be judged
    served: bool = True  # by servers, which documents name; False: all are drawn in this process
    _running: dict[str, list[float]] = field(default_factory=dict)  # a server's sums, older ones counting less

    def find(self, documents: Sequence[Rollout], table: np.ndarray) -> Fault | None:
        """Judge a step's documents, whose sums `table` [D, COLUMNS] has."""
        step = table.sum(0)
        if not np.isfinite(step).all():  # NaN: the gradient's check says so
            table = np.nan_to_num(table, nan=0.0, posinf=_ENDLESS, neginf=-_ENDLESS)
            step = table.sum(0)
        if step[COLUMN["older"]]:
            table = _less_the_choice(table)
            step = table.sum(0)
        servers = list(dict.fromkeys(map(server_of, documents))) if self.served else [_HERE]
        bound = -math.log(ALPHA / (4 * (len(documents) + len(servers))))
        agree = not len(table) or not _any_shown(table.max(0).tolist())
        for server in servers:
            places: Sequence[int] = range(len(documents))
            if len(servers) > 1:
                places = [place for place in places if server_of(documents[place]) == server]
            rows, sums = (table, step) if len(servers) == 1 else (table[places], table[places].sum(0))
            fault = self._of_server(server, places, rows, sums.tolist(), bound, agree)
            if fault is not None:
                return fault
        contradiction = self._contradicting(documents, table) if step[COLUMN["older"]] else None
        return contradiction or self._repeated(documents, table, bound)

    def _of_server(
        self,
        server: str,
        places: Sequence[int],
        rows: np.ndarray,  # of its documents
        step: list[float],  # the sums of `rows`
        bound: float,
        agree: bool,
    ) -> Fault | None:
        """Judge a server's documents. `agree`: no document has evidence against its log-probs."""
        total = self._remember(server, step)
        if not agree or _any_shown(total):
            evidence = self._evidence(np.vstack([rows, step, total]))
            each = evidence[:-2].max(1)
            worst = int(each.argmax())
            for row, found in ((step, evidence[-2]), (rows[worst], evidence[worst]), (total, evidence[-1])):
                if found.max() > bound:
                    order = np.argsort(-each, kind="stable")[: int((each > bound).sum()) or len(each)]
                    return Fault(server, tuple(places[number] for number in order), self._words(row, found))
        if self.draws and self._draws_evidence(total) > bound:
            return Fault(server, tuple(places), _too_sure(total), of_draws=True)
        return None

    def _remember(self, server: str, step: Sequence[float]) -> list[float]:
        """Add a step's sums to those of the server's earlier steps. A bet that was lost is not owed."""
        before = self._running.get(server, [0.0] * len(COLUMNS))
        for name in _BETS:
            before[COLUMN[name]] = max(before[COLUMN[name]], 0.0)
        self._running[server] = [new + _KEPT * old for new, old in zip(step, before, strict=True)]
        return self._running[server]

    def _evidence(self, rows: np.ndarray) -> np.ndarray:  # [R, COLUMNS] -> [R, tests], in nats
        """Compute the evidence against the log-probs of documents, or of servers: of each level, then of each bet."""
        beyond, bets = rows[:, _BEYOND], rows[:, [COLUMN[name] for name in _BETS]]
        return np.hstack([_poisson(beyond, rows[:, COLUMN["standing"], None] * _RATES), bets])

    def _words(self, row: Sequence[float], evidence: np.ndarray) -> str:
        strongest, standing = int(evidence.argmax()), row[COLUMN["standing"]]
        if strongest < len(LEVELS):
            level = LEVELS[strongest][0]
            count, size = row[COLUMN[f"beyond_{level:g}"]], level * self.tolerance
            return f"{count:.0f} of {standing:.0f} tokens are off by more than {size:g} nats"
        if _BETS[strongest - len(LEVELS)] == "older_up":
            return f"{row[COLUMN['older']]:.0f} tokens of older weights are much likelier than it says"
        return f"over {standing:.0f} tokens, the policy's probabilities over its own do not average to 1"

    def _draws_evidence(self, row: Sequence[float]) -> float:
        """Compute the evidence that tokens were drawn too likely, by Freedman's inequality.

        log p(token) + entropy has mean 0 and is at most the entropy. A distribution of entropy H over V tokens has a
        variance of log p of at most (log V + c) H, and less than 0.01 more.
        """
        standing, entropy = row[COLUMN["standing"]], row[COLUMN["entropy"]]
        excess = row[COLUMN["surprise"]] - _ENTROPY_SLACK * entropy
        largest = math.log(self.vocabulary_size)
        variance = (largest + _TAIL) * entropy + 0.01 * standing
        return float(excess**2 / (2 * (variance + largest * excess / 3))) if excess > 0 else 0.0

    def _repeated(self, documents: Sequence[Rollout], table: np.ndarray, bound: float) -> Fault | None:
        """Find a completion that came so often as its probability excludes, for whichever prompts.

        That n of N draws agree on something of probability u or less has a probability of at most C(N, n) u^(n-1).
        """
        labels = table[:, COLUMN["standing"]] + table[:, COLUMN["older"]]
        own = (table[:, COLUMN["logprobs"]] + self.tolerance * labels).tolist()
        alike: dict[bytes, list[int]] = defaultdict(list)  # places by completion
        for place, (document, count) in enumerate(zip(documents, labels.tolist(), strict=True)):
            if count:
                alike[document.completion].append(place)
        drawn = sum(map(len, alike.values()))
        for places in alike.values():
            if len(places) < 2:
                continue
            likeliest = max([own[place] for place in places])
            if (1 - len(places)) * likeliest <= bound or _too_often(len(places), drawn, likeliest) <= bound:
                continue
            # The weights that drew older tokens are gone: their sampler's word counts where it is higher.
            older = [documents[place] for place in places if table[place, COLUMN["older"]]]
            likeliest = max([likeliest, *(float(at_labels(document, "logprobs").sum()) for document in older)])
            if _too_often(len(places), drawn, likeliest) > bound:
                servers = " and ".join(sorted({server_of(documents[place]) for place in places}))
                problem = f"the same completion came {len(places)} times, and its log-prob is {likeliest:.3g}"
                return Fault(servers, tuple(places), problem, of_draws=True)
        return None

    def _contradicting(self, documents: Sequence[Rollout], table: np.ndarray) -> Fault | None:
        """Find log-probs of older tokens that cannot be those of any weights: where the completions of one prompt part,
        the probabilities of their next tokens add up to more than 1."""
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for place in np.flatnonzero(table[:, COLUMN["older"]]).tolist():
            document = documents[place]
            if document.group_id is not None:
                groups[server_of(document), document.group_id].append(place)
        for (server, _), places in groups.items():
            total = _total_where_they_part([documents[place] for place in places])
            if total > _MOST_IN_ALL * math.exp(5 * self.tolerance):
                problem = f"the probabilities that it names for different tokens behind one text add up to {total:.3g}"
                return Fault(server, tuple(places), problem)
        return None


def _any_shown(sums: Sequence[float]) -> bool:
    """Tell whether there is any evidence against log-probs."""
    return any(sums[place] > 0 for place in _SHOWS)


def at_labels(document: Rollout, name: str) -> np.ndarray:
    values: np.ndarray = getattr(document, name)
    return values[document.loss_mask]


def _total_where_they_part(documents: Sequence[Rollout]) -> float:
    """Add up the probabilities of the different tokens at the first place where completions of one prompt differ."""
    if len(documents) < 2:
        return 0.0
    length = min(document.num_labels for document in documents)
    tokens = np.stack([at_labels(document, "input_ids")[:length] for document in documents])
    apart = (tokens != tokens[0]).any(0)
    if not apart.any():
        return 0.0
    place = int(apart.argmax())
    named: dict[tuple[int, bytes], dict[int, float]] = defaultdict(dict)  # by version and the text before
    for document, token in zip(documents, tokens[:, place].tolist(), strict=True):
        version = int(at_labels(document, "model_version")[place])
        # What stands between the labels may differ: what a tool answered.
        before = document.input_ids[: np.flatnonzero(document.loss_mask)[place]].tobytes()
        named[version, before][token] = math.exp(at_labels(document, "logprobs")[place])
    return max(sum(probabilities.values()) for probabilities in named.values())


def _less_the_choice(rows: np.ndarray) -> np.ndarray:
    """Take off the bets of older documents what their choice may have added."""
    rows = rows.copy()
    rows[rows[:, COLUMN["older"]] > 0, COLUMN["older_up"]] -= _SELECTED
    return rows


def _too_sure(row: Sequence[float]) -> str:
    count = max(row[COLUMN["standing"]], 1.0)
    drawn, expected = row[COLUMN["surprise"]] - row[COLUMN["entropy"]], -row[COLUMN["entropy"]]
    return (
        f"it draws likely tokens too often: {count:.0f} tokens have a mean log-prob of {drawn / count:.3f}, and draws "
        f"of the policy have {expected / count:.3f}"
    )


def _poisson(count: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Bound minus the logarithm of the probability of so many events, of which `mean` are expected at most."""
    bound = np.zeros_like(count)
    more = count > mean
    count, mean = count[more], mean[more]
    with np.errstate(divide="ignore"):
        bound[more] = count * np.log(count / mean) - count + mean
    return bound


def _too_often(count: int, drawn: int, likeliest: float) -> float:
    """Bound minus the logarithm of the probability that `count` of `drawn` completions agree on one that is no
    likelier."""
    ways = math.lgamma(drawn + 1) - math.lgamma(count + 1) - math.lgamma(drawn - count + 1)  # the logarithm
    return -ways - (count - 1) * likeliest
