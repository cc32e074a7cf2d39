"""Rows for the head, and what it must give for them: float64, logits materialised, differentiated by autograd.

Dimensions: T labels, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from truestep.head.chunked import HeadRows
from truestep.head.logits import HeadSettings
from truestep.types import Coefficients

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


@dataclass(frozen=True)
class Expected:
    logprobs: torch.Tensor  # [T]
    entropy: torch.Tensor  # [T]
    logsumexp: torch.Tensor  # [T]
    hidden_gradient: torch.Tensor  # [T, H]
    weight_gradient: torch.Tensor  # [V, H]


def make_rows(
    labels: int,
    vocabulary: int,
    hidden: int = 6,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    equal_temperatures: bool = False,
    settings: HeadSettings = HeadSettings(),  # noqa: B008 - frozen
) -> HeadRows:
    """Hidden ~ N(0, 1) and weight ~ 2 N(0, 1) / sqrt(H): logits of a spread of 2, rounded to `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    temperature = 0.5 + 1.5 * torch.rand(labels, generator=generator)
    return HeadRows(
        hidden=torch.randn(labels, hidden, generator=generator).to(device, dtype),
        weight=(torch.randn(vocabulary, hidden, generator=generator) * 2 / hidden**0.5).to(device, dtype),
        label_ids=torch.randint(vocabulary, (labels,), generator=generator).to(device),
        temperature=(torch.ones(labels) if equal_temperatures else temperature).to(device),
        settings=settings,
    )


def make_coefficients(labels: int, *, seed: int = 1, with_b: bool = True, like: torch.Tensor) -> Coefficients:
    """Of either sign, and of rows with nothing to learn: a third of them is zero throughout."""
    generator = torch.Generator().manual_seed(seed)
    a, b, c = (torch.randn(3, labels, generator=generator, dtype=torch.float64)).unbind()
    used = (torch.arange(labels) % 3 != 1).double()
    options = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
    return Coefficients(
        (a * used).to(**options), (b * used).to(**options) if with_b else None, (c * used).to(**options)
    )


def logits_of(rows: HeadRows, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # [T, V]
    """The formulas of docs/contract.md, section 5, as they are written."""
    z = torch.einsum("th,vh->tv", hidden, weight)
    if rows.settings.softcap is not None:
        z = rows.settings.softcap * torch.tanh(z / rows.settings.softcap)
    return z * rows.settings.scale / rows.temperature.double()[:, None]


def scalar_with_gradient(z: torch.Tensor, label_ids: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    """A function of the logits whose gradient is `p·(a + b·log p) - c·onehot(y)`.

    The gradient of logsumexp is p, that of the entropy H is -p·(log p + H), that of z[y] is onehot(y).
    """
    a, c = coefficients.a.double(), coefficients.c.double()
    b = torch.zeros_like(a) if coefficients.b is None else coefficients.b.double()
    logsumexp = torch.logsumexp(z, -1)
    log_p = z - logsumexp[:, None]
    entropy = -(log_p.exp() * log_p).sum(-1)
    label_logit = z[torch.arange(len(label_ids)), label_ids]
    return (-b * entropy + (a - b * entropy.detach()) * logsumexp - c * label_logit).sum()


def expected(rows: HeadRows, coefficients: Coefficients) -> Expected:
    rows = on_cpu(rows)
    coefficients = Coefficients(
        coefficients.a.cpu(), None if coefficients.b is None else coefficients.b.cpu(), coefficients.c.cpu()
    )
    hidden = rows.hidden.double().clone().requires_grad_()
    weight = rows.weight.double().clone().requires_grad_()
    z = logits_of(rows, hidden, weight)
    log_p = torch.log_softmax(z, -1)
    scalar = scalar_with_gradient(z, rows.label_ids, coefficients)
    hidden_gradient, weight_gradient = torch.autograd.grad(scalar, (hidden, weight))
    return Expected(
        logprobs=log_p[torch.arange(len(rows.label_ids)), rows.label_ids].detach(),
        entropy=-(log_p.exp() * log_p).sum(-1).detach(),
        logsumexp=torch.logsumexp(z, -1).detach(),
        hidden_gradient=hidden_gradient,
        weight_gradient=weight_gradient,
    )


def on_cpu(rows: HeadRows) -> HeadRows:
    names = ("hidden", "weight", "label_ids", "temperature")
    return replace(rows, **{name: getattr(rows, name).cpu() for name in names})


def relative(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    difference = (actual.double().cpu() - wanted.double().cpu()).norm()
    return float(difference / wanted.double().norm().clamp(min=1e-30)) if float(difference) else 0.0


def largest_difference(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    assert actual.shape == wanted.shape
    return float((actual.double().cpu() - wanted.double().cpu()).abs().max()) if len(actual) else 0.0
