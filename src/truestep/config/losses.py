"""The options of every loss. A loss enters this file together with its class in `losses/label_losses.py`.

Imports no torch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from truestep.config.section import Section
from truestep.custom import CustomError, make_custom

NormalizeBy = Literal["labels", "documents", "document_means", "constant"]


class LossBase(Section):
    supervised: ClassVar[bool] = False  # needs no advantage and no log-probs of a sampler

    normalize_by: NormalizeBy = "labels"
    """The denominator: all labels of the step (labels), its documents (documents), each document's own labels and
    then the documents (document_means), or documents x max_labels (constant, Dr. GRPO)."""
    max_labels: Annotated[int, Field(ge=1)] | None = None
    """The constant of normalize_by: constant, usually the longest completion allowed."""
    gradient_divisor: Literal["none", "deepspeed"] = "none"
    """deepspeed divides the gradient, not the reported loss, once more by the step's documents: the implicit
    1/(accumulation x world) that clip thresholds tuned there expect."""
    entropy_bonus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight w of the term -w x entropy, with the same denominator as the loss."""
    z_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the term logsumexp squared, with the same denominator as the loss."""
    metrics: Literal["none", "basic", "full"] = "basic"
    """Which metrics are logged: none leaves only those that every run has, full adds entropy and percentiles of the
    log-ratio."""

    @model_validator(mode="after")
    def _constant_needs_its_constant(self) -> LossBase:
        if (self.normalize_by == "constant") != (self.max_labels is not None):
            raise ValueError("normalize_by: constant and max_labels go together: set both or neither")
        return self


Epsilon = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Clipped(LossBase):
    epsilon_low: Epsilon = 0.2
    """The ratio is clipped at 1 - epsilon_low from below."""
    epsilon_high: Epsilon = 0.2
    """The ratio is clipped at 1 + epsilon_high from above."""


class DualClipped(Clipped):
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """c > 1: where the advantage is negative the loss is at most -c x advantage."""


class GrpoLoss(DualClipped):
    type: Literal["grpo"] = "grpo"
    """Clipped importance ratio per label."""


class GspoLoss(DualClipped):
    type: Literal["gspo"]
    """Clipped importance ratio per document: the geometric mean over its labels."""
    normalize_by: NormalizeBy = "document_means"
    epsilon_low: Epsilon = 3e-4
    epsilon_high: Epsilon = 4e-4


class ReinforceLoss(LossBase):
    type: Literal["reinforce"]
    """Truncated importance weight, held constant, times the log-prob."""
    ratio_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The importance weight is at most this; null leaves it uncapped."""


class CispoLoss(Clipped):
    type: Literal["cispo"]
    """Clipped importance weight, held constant, times the log-prob: no label loses its gradient."""
    epsilon_low: Epsilon = 1.0
    epsilon_high: Epsilon = 4.0


class CrossEntropyLoss(LossBase):
    type: Literal["cross_entropy"]
    """Supervised: needs no advantage and no sampler log-probs."""
    supervised: ClassVar[bool] = True


class CustomLoss(LossBase):
    type: Literal["custom"]
    """A loss of your own, by import path."""
    function: str
    """The loss, as package.module:Class: a frozen dataclass that derives from truestep's LabelLoss. Its fields are its
    options."""
    options: dict[str, Any] | None = None
    """The options of the loss, by the names of its fields; checked like any other option."""

    @cached_property
    def custom(self) -> Any:
        """The loss itself, made from its options. This imports the user's module."""
        return make_custom("loss.function", self.function, self.options or {})

    @property
    def supervised(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.custom, "supervised", False))

    @model_validator(mode="after")
    def _can_be_made(self) -> CustomLoss:
        try:
            self.custom  # noqa: B018
        except CustomError as error:
            raise ValueError(str(error).removeprefix("loss.")) from error
        return self


def _loss_type(value: Any) -> Any:
    return value.get("type", "grpo") if isinstance(value, dict) else getattr(value, "type", None)


LossConfig = Annotated[
    Annotated[GrpoLoss, Tag("grpo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[CrossEntropyLoss, Tag("cross_entropy")]
    | Annotated[CustomLoss, Tag("custom")],
    Discriminator(_loss_type),
]


def default_loss() -> GrpoLoss:
    return GrpoLoss()
