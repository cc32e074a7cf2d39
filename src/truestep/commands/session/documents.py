"""The documents that a session's calls are given, as records or as documents."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from truestep.commands.session.errors import SessionError
from truestep.config.schema import Config
from truestep.model.policy import Policy
from truestep.rollouts.files import check_records
from truestep.rollouts.record import Needs
from truestep.run.assemble.sources import checks_of, replayed_by
from truestep.run.assemble.step import needs_logprobs
from truestep.types import Rollout

Documents = Sequence[Rollout | Mapping[str, Any]]


def checked(records: Documents, config: Config, policy: Policy, *, prefix: int, needs: Config | None) -> list[Rollout]:
    """Return records as documents. Those without an id are named by `prefix` and their number. `needs`: the
    configuration whose loss says what they need; None: nothing."""
    given = [record for record in records if isinstance(record, Rollout)]
    if given and len(given) == len(records):
        _check_rollouts(given, needs)
        return given
    checks = checks_of(needs or config, policy.vocabulary_size, lambda: policy.tokenizer, replayed_by(config, policy))
    checks = replace(checks, group_size=None)
    if needs is None:
        checks = replace(checks, needs=Needs(logprobs=False, advantages=False, advantage_rule="none"))
    named = (
        {"id": f"{prefix}.{number}", **record} if isinstance(record, Mapping) else record
        for number, record in enumerate(records)
    )
    return list(check_records(named, checks))


def _check_rollouts(documents: Sequence[Rollout], needs: Config | None) -> None:
    if needs is None or needs.loss.supervised:
        return
    for document in documents:
        if document.num_labels and document.advantages is None and document.difference is None:
            raise SessionError(f"document {document.id} has no advantage: make documents of records with rewards")
        if document.num_labels and needs_logprobs(needs) and document.logprobs is None:
            raise SessionError(f"document {document.id} has no log-probs of its sampler, which the loss needs")
