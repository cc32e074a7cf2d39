"""The options of every loss. A loss enters this file together with its class in `losses/label_losses.py`.

Imports no torch.
"""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator

from truestep.config.section import Count, NotNegative, Positive, Section, by_type
from truestep.custom import CustomError, make_custom

NormalizeBy = Literal["labels", "documents", "document_means", "constant"]


class LossBase(Section):
    supervised: ClassVar[bool] = False  # True: the loss needs no advantage and no log-probs of a sampler

    normalize_by: NormalizeBy = "labels"
    """The denominator of every term. labels: all labels of the step. documents: its documents. document_means: each
    document's own labels, and then the documents. constant: documents x max_labels (Dr. GRPO)."""
    max_labels: Count | None = None
    """The constant of normalize_by: constant. It is usually the longest completion allowed."""
    gradient_divisor: Literal["none", "deepspeed"] = "none"
    """deepspeed: the gradient is divided once more by the step's documents, and the reported loss is not. DeepSpeed
    divides so (1 / (accumulation x world)), and clip thresholds that were tuned there expect it."""
    entropy_bonus: NotNegative = 0.0
    """The weight w of the term -w x entropy, which has the same denominator as the loss."""
    z_loss: NotNegative = 0.0
    """The weight of the term logsumexp squared, which has the same denominator as the loss."""
    metrics: Literal["none", "basic", "full"] = "basic"
    """The metrics that are logged. none: only those that every run has. basic: ratios, advantages, rewards and
    staleness too. full: entropy and percentiles of the log-ratio too."""

    @model_validator(mode="after")
    def _constant_needs_its_constant(self) -> "LossBase":
        if (self.normalize_by == "constant") != (self.max_labels is not None):
            raise ValueError("normalize_by: constant and max_labels go together: set both or neither")
        return self


class Clipped(LossBase):
    epsilon_low: NotNegative = 0.2
    """The ratio is clipped at 1 - epsilon_low from below."""
    epsilon_high: NotNegative = 0.2
    """The ratio is clipped at 1 + epsilon_high from above."""


class DualClipped(Clipped):
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """A number c > 1: where the advantage is negative, the loss is at most -c x advantage."""


class GrpoLoss(DualClipped):
    type: Literal["grpo"] = "grpo"
    """The importance ratio of each label is clipped."""


class GspoLoss(DualClipped):
    type: Literal["gspo"]
    """The importance ratio of each document, the geometric mean over its labels, is clipped."""
    normalize_by: NormalizeBy = "document_means"
    epsilon_low: NotNegative = 3e-4
    epsilon_high: NotNegative = 4e-4


class ReinforceLoss(LossBase):
    type: Literal["reinforce"]
    """The log-prob is weighted by the importance ratio, which is capped and held constant."""
    ratio_cap: Positive | None = None
    """The importance ratio counts as at most this. null: it is not capped."""


class CispoLoss(Clipped):
    type: Literal["cispo"]
    """The log-prob is weighted by the clipped importance ratio, held constant: no label loses its gradient."""
    epsilon_low: NotNegative = 1.0
    epsilon_high: NotNegative = 4.0


class CrossEntropyLoss(LossBase):
    type: Literal["cross_entropy"]
    """Supervised learning: it needs neither advantages nor the sampler's log-probs."""
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
        """Make the loss from its options. This imports the user's module."""
        return make_custom("loss.function", self.function, self.options or {})

    @property
    def supervised(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.custom, "supervised", False))

    @model_validator(mode="after")
    def _can_be_made(self) -> "CustomLoss":
        try:
            self.custom  # noqa: B018
        except CustomError as error:
            raise ValueError(str(error).removeprefix("loss.")) from error
        return self


LossConfig = Annotated[
    Annotated[GrpoLoss, Tag("grpo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[CrossEntropyLoss, Tag("cross_entropy")]
    | Annotated[CustomLoss, Tag("custom")],
    by_type("grpo"),
]


def default_loss() -> GrpoLoss:
    return GrpoLoss()
