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
_HERE = "the sampler"


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
    _running: dict[str, np.ndarray] = field(default_factory=dict)  # a server's sums, older ones counting less

    def find(self, documents: Sequence[Rollout], table: np.ndarray) -> Fault | None:
        """Judge a step's documents, whose sums `table` [D, COLUMNS] has."""
        table = np.nan_to_num(table, nan=0.0, posinf=_ENDLESS, neginf=-_ENDLESS)  # NaN: the gradient's check says so
        by_server: dict[str, list[int]] = defaultdict(list)
        for place, document in enumerate(documents):
            by_server[server_of(document)].append(place)
        bound = -math.log(ALPHA / (4 * (len(documents) + len(by_server))))
        for server, places in by_server.items():
            rows = table[places]
            each = [self._evidence(row - _selected(row[None])) for row in rows]
            step, total = rows.sum(0) - _selected(rows), self._remember(server, rows)
            for evidence, problem in (self._evidence(step), max(each, key=_first), self._evidence(total)):
                if evidence > bound:
                    order = sorted(range(len(places)), key=lambda number: -each[number][0])
                    clear = sum(evidence > bound for evidence, _ in each) or len(order)
                    return Fault(server, tuple(places[number] for number in order[:clear]), problem)
            if self.draws and self._draws_evidence(total) > bound:
                return Fault(server, tuple(places), _too_sure(total), of_draws=True)
        return self._contradicting(documents, table) or self._repeated(documents, table, bound)

    def _remember(self, server: str, rows: np.ndarray) -> np.ndarray:
        """Add a step's sums to those of the server's earlier steps. A bet that was lost is not owed."""
        before = self._running.get(server, np.zeros(len(COLUMNS)))
        for name in ("up", "down", "older_up"):
            before[COLUMN[name]] = max(before[COLUMN[name]], 0.0)
        self._running[server] = rows.sum(0) - _selected(rows) + _KEPT * before
        return self._running[server].copy()

    def _evidence(self, row: np.ndarray) -> tuple[float, str]:
        """Compute the evidence against a document's or a server's log-probs, in nats, and its words."""
        standing = row[COLUMN["standing"]]
        found = [(0.0, "")]
        for level, rate in LEVELS:
            count = row[COLUMN[f"beyond_{level:g}"]]
            words = f"{count:.0f} of {standing:.0f} tokens are off by more than {level * self.tolerance:g} nats"
            found.append((_poisson(count, rate * standing), words))
        tokens = f"over {standing:.0f} tokens, the policy's probabilities over the server's do not average to 1"
        found += [(float(row[COLUMN[name]]), tokens) for name in ("up", "down") if standing]
        if row[COLUMN["older"]]:
            older = f"{row[COLUMN['older']]:.0f} tokens of older weights are much likelier than it says"
            found.append((float(row[COLUMN["older_up"]]), older))
        return max(found, key=_first)

    def _draws_evidence(self, row: np.ndarray) -> float:
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
        copies: dict[bytes, list[int]] = defaultdict(list)
        for place, document in enumerate(documents):
            if table[place][[COLUMN["standing"], COLUMN["older"]]].any():
                copies[document.input_ids[document.loss_mask].tobytes()].append(place)
        drawn = sum(map(len, copies.values()))
        for places in copies.values():
            if len(places) < 2:
                continue
            likeliest = max(self._log_probability(documents[place], table[place]) for place in places)
            if -_log_choose(drawn, len(places)) - (len(places) - 1) * likeliest > bound:
                servers = " and ".join(sorted({server_of(documents[place]) for place in places}))
                odds = f"a probability of {math.exp(likeliest):.1g} by the policy"
                problem = f"the same completion came {len(places)} times, which has {odds}"
                return Fault(servers, tuple(places), problem, of_draws=True)
        return None

    def _log_probability(self, document: Rollout, row: np.ndarray) -> float:
        """Bound a completion's log-probability from above. The weights that drew older tokens are gone: their sampler's
        word counts where it is higher."""
        own = float(row[COLUMN["logprobs"]]) + self.tolerance * document.num_labels
        if not row[COLUMN["older"]]:
            return own
        return max(own, float(at_labels(document, "logprobs").sum()))

    def _contradicting(self, documents: Sequence[Rollout], table: np.ndarray) -> Fault | None:
        """Find log-probs of older tokens that cannot be those of any weights: where the completions of one prompt part,
        the probabilities of their next tokens add up to more than 1."""
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for place, document in enumerate(documents):
            if document.group_id is not None and table[place][COLUMN["older"]]:
                groups[server_of(document), document.group_id].append(place)
        for (server, _), places in groups.items():
            total = _total_where_they_part([documents[place] for place in places])
            if total > _MOST_IN_ALL * math.exp(5 * self.tolerance):
                problem = f"the probabilities that it names for different tokens behind one text add up to {total:.3g}"
                return Fault(server, tuple(places), problem)
        return None


def _first(pair: tuple[float, str]) -> float:
    return pair[0]


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
    named: dict[int, dict[int, float]] = defaultdict(dict)  # by version
    for document, token in zip(documents, tokens[:, place].tolist(), strict=True):
        version = int(at_labels(document, "model_version")[place])
        named[version][token] = math.exp(at_labels(document, "logprobs")[place])
    return max(sum(probabilities.values()) for probabilities in named.values())


def _selected(rows: np.ndarray) -> np.ndarray:
    """Give what is taken off the sums of rows, since their older documents may have been chosen."""
    taken_off = np.zeros(len(COLUMNS))
    taken_off[COLUMN["older_up"]] = _SELECTED * (rows[:, COLUMN["older"]] > 0).sum()
    return taken_off


def _too_sure(row: np.ndarray) -> str:
    count = max(row[COLUMN["standing"]], 1.0)
    drawn, expected = row[COLUMN["surprise"]] - row[COLUMN["entropy"]], -row[COLUMN["entropy"]]
    return (
        f"it draws likely tokens too often: {count:.0f} tokens have a mean log-prob of {drawn / count:.3f}, and draws "
        f"of the policy have {expected / count:.3f}"
    )


def _poisson(count: float, mean: float) -> float:
    """Bound minus the logarithm of the probability of so many events, of which `mean` are expected at most."""
    if count <= mean:
        return 0.0
    return count * math.log(count / mean) - count + mean if mean else math.inf


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
