"""Log-probs of prompts over a vocabulary of a real size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from truestep.commands.tinker import scoring

VOCABULARY = 49152


def test_log_probs_are_float64_s_where_logits_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """To 4e-6: the unit in the last place of a float32 between 32 and 64, where the logsumexp of these lies. On a CPU
    torch's own log_softmax is off by 8e-6."""
    ids = torch.randint(0, VOCABULARY, (257,), generator=torch.Generator().manual_seed(0)).tolist()
    z = 20.0 + 4.0 * torch.randn(256, VOCABULARY, generator=torch.Generator().manual_seed(1))
    exact = z.double().log_softmax(-1)
    monkeypatch.setattr(scoring, "_logits", lambda policy, given: iter([(0, z)]))

    class Policy:
        device = torch.device("cpu")

    found = scoring.score(Policy(), ids, top=5)  # type: ignore[arg-type]
    assert found.top is not None
    likely, values = found.top
    behind = torch.tensor(ids[1:])[:, None]
    for told, targets in ((found.logprobs[:, None], behind), (values, torch.from_numpy(likely))):
        own = exact.gather(1, targets).numpy()
        off = np.abs(told - own) / np.maximum(np.abs(own), 1.0)
        assert off.max() <= 4e-6
