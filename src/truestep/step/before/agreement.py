"""The verdict on a sampler's log-probs: do they agree with the policy's, within the run's numerical tolerance?

Each test bounds the probability of a false alarm. For all tests of a step together it is at most `ALPHA`
(docs/sampling.md has the table). The verdict depends only on sums that all ranks have, so all ranks get the same one.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from truestep.losses.agreement import COLUMN, COLUMNS, LEVELS
from truestep.types import Rollout

ALPHA = 1e-12
_KEPT = 0.9  # weight of a server's evidence from earlier steps, per step
_SELECTED = 3.0  # nats; allowance for older documents that were selected by reward or length
_MOST_IN_ALL = 1.02  # largest accepted sum of the probabilities of different tokens
_ENTROPY_SLACK = 0.02  # share of the entropy by which numerical differences may make draws more likely
_TAIL = 12.0  # nats below the uniform probability; less likely tokens contribute almost nothing to a variance
_ENDLESS = 1e6
_BETS = ("up", "down", "older_up")
_HERE = "the sampler"
_BEYOND = [COLUMN[f"beyond_{level:g}"] for level, _ in LEVELS]
_SHOWS = [*_BEYOND, *(COLUMN[name] for name in _BETS)]
_RATES = np.array([rate for _, rate in LEVELS])


@dataclass(frozen=True)
class Fault:
    """A fault of a sampler: its log-probs are not the policy's, or it did not draw its tokens with them."""

    server: str
    places: tuple[int, ...]  # indices of its documents in the plan, in order of decreasing evidence
    problem: str
    of_draws: bool = False  # True: the log-probs are right, but the tokens were not drawn with them


def server_of(document: Rollout) -> str:
    return str(document.metadata.get("server", _HERE))


@dataclass
class Judge:
    tolerance: float  # nats; from sampler.tolerance
    vocabulary_size: int
    draws: bool = True  # whether draws can be judged: completions were not selected by their content
    served: bool = True  # True: servers drew the completions, and documents name them; False: this process did
    # running sums by server, with weight `_KEPT` per step
    _running: dict[str, list[float]] = field(default_factory=dict)

    def find(self, documents: Sequence[Rollout], table: np.ndarray) -> Fault | None:
        """Judge a step's documents, given their sums `table` [D, COLUMNS]."""
        step = table.sum(0)
        if not np.isfinite(step).all():  # the check of the gradient reports NaN
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
        rows: np.ndarray,  # the rows of the server's documents
        step: list[float],  # the sums of `rows`
        bound: float,
        agree: bool,
    ) -> Fault | None:
        """Judge a server's documents. `agree`: no document has any evidence against its log-probs."""
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
        """Add a step's sums to those of the server's earlier steps. Negative sums of bets from earlier steps count as
        0."""
        before = self._running.get(server, [0.0] * len(COLUMNS))
        for name in _BETS:
            before[COLUMN[name]] = max(before[COLUMN[name]], 0.0)
        self._running[server] = [new + _KEPT * old for new, old in zip(step, before, strict=True)]
        return self._running[server]

    def _evidence(self, rows: np.ndarray) -> np.ndarray:  # [R, COLUMNS] -> [R, tests], in nats
        """Compute the evidence against the log-probs, per row (a document or a server): one value per level, then one
        per bet."""
        beyond, bets = rows[:, _BEYOND], rows[:, [COLUMN[name] for name in _BETS]]
        return np.hstack([_poisson(beyond, rows[:, COLUMN["standing"], None] * _RATES), bets])

    def _words(self, row: Sequence[float], evidence: np.ndarray) -> str:
        strongest, standing = int(evidence.argmax()), row[COLUMN["standing"]]
        if strongest < len(LEVELS):
            level = LEVELS[strongest][0]
            count, size = row[COLUMN[f"beyond_{level:g}"]], level * self.tolerance
            return f"{count:.0f} of {standing:.0f} tokens are off by more than {size:g} nats"
        if _BETS[strongest - len(LEVELS)] == "older_up":
            return f"{row[COLUMN['older']]:.0f} tokens of older weights are much likelier than the sampler says"
        return f"over {standing:.0f} tokens, the policy's probabilities divided by the sampler's do not average to 1"

    def _draws_evidence(self, row: Sequence[float]) -> float:
        """Compute the evidence that tokens were drawn with too high probabilities, by Freedman's inequality.

        log p(token) + entropy has mean 0 and is at most the entropy. For a distribution of entropy H over V tokens, the
        variance of log p is at most (log V + c) H + 0.01.
        """
        standing, entropy = row[COLUMN["standing"]], row[COLUMN["entropy"]]
        excess = row[COLUMN["surprise"]] - _ENTROPY_SLACK * entropy
        largest = math.log(self.vocabulary_size)
        variance = (largest + _TAIL) * entropy + 0.01 * standing
        return float(excess**2 / (2 * (variance + largest * excess / 3))) if excess > 0 else 0.0

    def _repeated(self, documents: Sequence[Rollout], table: np.ndarray, bound: float) -> Fault | None:
        """Find a completion that occurs more often than its probability allows, whatever the prompts.

        If n of N draws are the same completion, and its probability is at most u, then this has a probability of at
        most C(N, n) u^(n-1).
        """
        labels = table[:, COLUMN["standing"]] + table[:, COLUMN["older"]]
        own = (table[:, COLUMN["logprobs"]] + self.tolerance * labels).tolist()
        alike: dict[bytes, list[int]] = defaultdict(list)  # indices of documents, by completion
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
            # The weights that drew older tokens no longer exist. If the sampler's log-prob is higher than
            # the policy's, the sampler's is used.
            older = [documents[place] for place in places if table[place, COLUMN["older"]]]
            likeliest = max([likeliest, *(float(at_labels(document, "logprobs").sum()) for document in older)])
            if _too_often(len(places), drawn, likeliest) > bound:
                servers = " and ".join(sorted({server_of(documents[place]) for place in places}))
                problem = f"the same completion came {len(places)} times, and its log-prob is {likeliest:.3g}"
                return Fault(servers, tuple(places), problem, of_draws=True)
        return None

    def _contradicting(self, documents: Sequence[Rollout], table: np.ndarray) -> Fault | None:
        """Find log-probs of older tokens that no weights can have. At the first difference between completions of one
        prompt, the probabilities of their next tokens must not add up to more than 1."""
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for place in np.flatnonzero(table[:, COLUMN["older"]]).tolist():
            document = documents[place]
            if document.group_id is not None:
                groups[server_of(document), document.group_id].append(place)
        for (server, _), places in groups.items():
            total = _total_where_they_part([documents[place] for place in places])
            if total > _MOST_IN_ALL * math.exp(5 * self.tolerance):
                problem = (
                    f"the probabilities that it reports for different tokens after the same text add up to {total:.3g}"
                )
                return Fault(server, tuple(places), problem)
        return None


def _any_shown(sums: Sequence[float]) -> bool:
    """Tell whether there is any evidence against log-probs."""
    return any(sums[place] > 0 for place in _SHOWS)


def at_labels(document: Rollout, name: str) -> np.ndarray:
    values: np.ndarray = getattr(document, name)
    return values[document.loss_mask]


def _total_where_they_part(documents: Sequence[Rollout]) -> float:
    """Return the sum of the probabilities of the different tokens at the first position where completions of one prompt
    differ."""
    if len(documents) < 2:
        return 0.0
    length = min(document.num_labels for document in documents)
    tokens = np.stack([at_labels(document, "input_ids")[:length] for document in documents])
    apart = (tokens != tokens[0]).any(0)
    if not apart.any():
        return 0.0
    place = int(apart.argmax())
    # probability by token, by version and preceding text
    named: dict[tuple[int, bytes], dict[int, float]] = defaultdict(dict)
    for document, token in zip(documents, tokens[:, place].tolist(), strict=True):
        version = int(at_labels(document, "model_version")[place])
        # Text between the labels may differ, such as a tool's answer.
        before = document.input_ids[: np.flatnonzero(document.loss_mask)[place]].tobytes()
        named[version, before][token] = math.exp(at_labels(document, "logprobs")[place])
    return max(sum(probabilities.values()) for probabilities in named.values())


def _less_the_choice(rows: np.ndarray) -> np.ndarray:
    """Subtract the most that selection may have added to the bets of older documents."""
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
    """Return a lower bound of -log P(at least `count` events), if at most `mean` events are expected."""
    bound = np.zeros_like(count)
    more = count > mean
    count, mean = count[more], mean[more]
    with np.errstate(divide="ignore"):
        bound[more] = count * np.log(count / mean) - count + mean
    return bound


def _too_often(count: int, drawn: int, likeliest: float) -> float:
    """Return a lower bound of -log P(`count` of `drawn` completions are equal), if the completion's log-prob is at most
    `likeliest`."""
    # the logarithm of the binomial coefficient
    ways = math.lgamma(drawn + 1) - math.lgamma(count + 1) - math.lgamma(drawn - count + 1)
    return -ways - (count - 1) * likeliest
