"""The text of completions, and the tokens that end them."""

from collections.abc import Callable, Sequence

from truestep.model.policy import Policy


def reader(policy: Policy) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes a completion to the text that rewards get: without special tokens."""

    def read(token_ids: Sequence[int]) -> str:
        return str(policy.tokenizer.decode(token_ids, skip_special_tokens=True))

    return read


def stop_ids(policy: Policy) -> frozenset[int]:
    """Return the ids of all end-of-text tokens, by the model's generation config, its config and its tokenizer."""
    ids: set[int] = set()
    for settings in (getattr(policy.model, "generation_config", None), policy.model.config, policy.tokenizer):
        found = getattr(settings, "eos_token_id", None)
        if found is not None:
            ids |= set(found if isinstance(found, list) else [found])
    return frozenset(ids)
