"""The options of every loss. Add a loss here together with its class in `losses/label_losses.py`.

Imports no torch.
"""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, create_model, model_validator

from truestep.config.custom import CustomError, make_custom_loss
from truestep.config.section import Count, NotNegative, Positive, Section, by_type

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NormalizeBy = Literal["labels", "documents", "document_means", "constant"]


class EntropyTargetConfig(Section):
    entropy: NotNegative
    """The target entropy in nats, for the metric `entropy`: the mean over documents of the mean over a document's
    labels."""
    rate: Positive = 0.005
    """The weight changes by rate x (target - the step's entropy) after each step. Lower it if the entropy
    oscillates."""
    largest_weight: Positive = 0.1
    """The largest weight; the smallest is 0."""


class ClipCovConfig(Section):
    share: Share = 2e-4
    """The share of the step's labels to drop from the loss (at least one label), at random among those in the band."""
    low: Finite = 1.0
    """The lower end of the band of covariances."""
    high: Finite = 5.0
    """The upper end of the band of covariances."""

    @model_validator(mode="after")
    def _band_is_one(self) -> "ClipCovConfig":
        if self.low >= self.high:
            raise ValueError(f"low: {self.low:g} is not below high: {self.high:g}, so no label could be chosen")
        return self


class KlCovConfig(Section):
    share: Share = 2e-4
    """The share of the step's labels to penalise (at least one label): those with the highest covariance above 0."""
    weight: Positive = 1.0
    """The weight of the KL term at the chosen labels."""


class LossBase(Section):
    supervised: ClassVar[bool] = False  # True: the loss needs no advantage and no log-probs of a sampler

    normalize_by: NormalizeBy = "labels"
    """The denominator of every term of the loss. `labels`: all labels of the step, so that each label weighs the same.
    `documents`: all documents of the step. `document_means`: the mean over each document's labels, then over documents,
    so that each document weighs the same. `constant`: documents x max_labels (Dr. GRPO)."""
    max_labels: Count | None = None
    """With `normalize_by: constant`, the constant: a number of labels, usually the longest completion allowed."""
    gradient_divisor: Literal["none", "deepspeed"] | Positive = "none"
    """Also divide the gradient (not the reported loss) by this, so that clip thresholds from other trainers can be
    kept. `deepspeed`: the number of documents in the step. DeepSpeed divides by it (1 / (accumulation x world)) if each
    batch has one document."""
    entropy_bonus: NotNegative = 0.0
    """The weight w of the term -w x entropy, with the denominator of the loss. It keeps the policy exploring."""
    entropy_normalize_by: Literal["labels", "documents", "document_means"] | None = None
    """The denominator of the entropy bonus. `null`: that of the loss."""
    entropy_target: EntropyTargetConfig | None = None
    """Adjust the weight of the entropy bonus after each step so that the entropy stays at a target. The weight starts
    at entropy_bonus. `null`: a constant weight."""
    z_loss: NotNegative = 0.0
    """The weight of the squared logsumexp of the logits, with the denominator of the loss. It keeps logits from
    growing."""
    metrics: Literal["none", "basic", "full"] = "basic"
    """Which metrics are logged. `none`: only those that every run logs. `basic`: also ratios, advantages, rewards and
    staleness. `full`: also percentiles of the log-ratio."""

    @model_validator(mode="after")
    def _constant_needs_its_constant(self) -> "LossBase":
        if (self.normalize_by == "constant") != (self.max_labels is not None):
            raise ValueError("normalize_by: constant and max_labels go together: set both or neither")
        return self

    @model_validator(mode="after")
    def _denominator_of_a_bonus(self) -> "LossBase":
        if self.entropy_normalize_by is not None and not self.entropy_bonus and self.entropy_target is None:
            raise ValueError(
                "entropy_normalize_by has no effect without an entropy bonus: set entropy_bonus or "
                "entropy_target, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _bonus_starts_within_its_bounds(self) -> "LossBase":
        target = self.entropy_target
        if target is not None and self.entropy_bonus > target.largest_weight:
            raise ValueError(
                f"entropy_bonus: {self.entropy_bonus:g} is above entropy_target.largest_weight: "
                f"{target.largest_weight:g}; the weight has to start at or below it"
            )
        return self


class CorrectionConfig(Section):
    type: Literal["truncate", "mask", "reject"]
    """The weight of a label, by its importance ratio c. `truncate`: c clamped to [low, high]. `mask`: c inside [low,
    high], else 0. `reject`: 1 inside [low, high], else 0."""
    level: Literal["label", "document", "document_mean"] = "label"
    """What the ratio c is taken over. `label`: each label. `document`: the product over the document's labels.
    `document_mean`: the geometric mean over the document's labels."""
    high: Positive
    """The upper bound of c."""
    low: NotNegative = 0.0
    """The lower bound of c."""

    @model_validator(mode="after")
    def _bounds_agree(self) -> "CorrectionConfig":
        if self.low > self.high:
            raise ValueError(f"low: {self.low:g} is above high: {self.high:g}, so no c lies between them")
        return self


class _KlReference(Section):
    @model_validator(mode="after")
    def _the_reward_has_its_estimator(self) -> "_KlReference":
        estimator = getattr(self, "estimator", None)
        if getattr(self, "in", None) == "reward" and estimator not in (None, "k1"):
            raise ValueError(f"estimator: {estimator} is for in: loss; in: reward always takes k1")
        return self


# Made with create_model: the option's name `in` is a Python keyword, so no class attribute can have it.
KlReferenceConfig = create_model(
    "KlReferenceConfig",
    __base__=_KlReference,
    **{
        "weight": (Positive, Field(description="The weight of the KL penalty.")),
        "estimator": (
            Literal["k1", "k2", "k3", "unbiased"] | None,
            Field(
                None,
                description="The KL estimator, with r = log-prob - reference's log-prob. `k1`: r. `k2`: r² / 2. "
                "`k3`: exp(-r) - 1 + r. `unbiased`: the importance ratio times k3. `null`: k3 in the loss, k1 in the "
                "reward.",
            ),
        ),
        "in": (
            Literal["loss", "reward"],
            Field(
                "loss",
                description="`loss`: a term of the loss, with the loss's denominator. `reward`: weight x (old log-prob "
                "- reference's log-prob) is subtracted from each label's advantage.",
            ),
        ),
        "path": (
            str | None,
            Field(
                None,
                description="The reference model: a Hugging Face directory with the same vocabulary. `null`: the "
                "weights that the run started with. `records`: no model; the records have reference_logprobs.",
            ),
        ),
        "offload": (
            bool,
            Field(
                False,
                description="Keep the reference's weights in host memory, and copy them to the GPU for its forward "
                "pass in each step. Results do not change.",
            ),
        ),
    },  # type: ignore[call-overload]
)


class PolicyLoss(LossBase):
    """The options of losses that learn from advantages."""

    old_logprobs: Literal["sampler", "recompute"] = "sampler"
    """Where the old log-probs of the importance ratio come from. `sampler`: from the record. `recompute`: from the
    trainer, with the weights before the first update on the documents; it costs no extra forward pass. The ratio then
    covers only the change by updates; `correction` covers the difference between sampler and trainer."""
    kl_reference: KlReferenceConfig | None = None  # type: ignore[valid-type]
    """A KL penalty against a frozen reference model. `null`: none."""

    correction: CorrectionConfig | None = None
    """Importance weights against the difference between sampler and policy (TIS, IcePop): a constant weight on each
    label's policy loss. A label of weight 0 still counts in the denominator. `null`: none."""
    off_policy_mask: NotNegative | None = None
    """Mask the labels with negative advantage in documents whose mean of (sampler's log-prob - policy's log-prob) is
    above this. `null`: none."""
    clip_cov: ClipCovConfig | None = None
    """Clip-Cov: drop from the policy loss a small random share of the labels whose covariance of log-prob and advantage
    lies in a band. They still count in the denominator. `null`: none."""
    kl_cov: KlCovConfig | None = None
    """KL-Cov: a KL penalty towards the old policy at the labels with the highest covariance of log-prob and advantage.
    `null`: none."""

    @model_validator(mode="after")
    def _one_choice_of_labels(self) -> "PolicyLoss":
        if self.clip_cov is not None and self.kl_cov is not None:
            raise ValueError("clip_cov and kl_cov both choose labels by their covariance: remove one of the two")
        return self


class Clipped(PolicyLoss):
    epsilon_low: NotNegative = 0.2
    """The ratio is clipped below 1 - epsilon_low (gmpo: the log-ratio below -epsilon_low)."""
    epsilon_high: NotNegative = 0.2
    """The ratio is clipped above 1 + epsilon_high (gmpo: the log-ratio above epsilon_high)."""


class DualClipped(Clipped):
    dual_clip: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Dual clipping: the largest ratio, above 1, for labels with negative advantage. Their loss is at most -dual_clip x
    advantage. `null`: none."""


class GrpoLoss(DualClipped):
    type: Literal["grpo"] = "grpo"
    """Clips the importance ratio of each label."""


class GspoLoss(DualClipped):
    type: Literal["gspo"]
    """Clips the importance ratio of each document: the geometric mean over its labels."""
    normalize_by: NormalizeBy = "document_means"
    epsilon_low: NotNegative = 3e-4
    epsilon_high: NotNegative = 4e-4


class ReinforceLoss(PolicyLoss):
    type: Literal["reinforce"]
    """Policy gradient weighted by the importance ratio, which is capped and has no gradient."""
    ratio_cap: Positive | None = None
    """The largest importance ratio. `null`: no cap."""


class CispoLoss(Clipped):
    type: Literal["cispo"]
    """Policy gradient weighted by the clipped importance ratio. The weight has no gradient, so clipping removes no
    label from the policy gradient."""
    epsilon_low: NotNegative = 1.0
    epsilon_high: NotNegative = 4.0


class SapoLoss(PolicyLoss):
    type: Literal["sapo"]
    """A soft gate instead of a clip: the gradient decreases smoothly as the ratio moves away from 1."""
    tau_positive: Positive = 1.0
    """How fast the gradient decreases for labels whose advantage is 0 or positive."""
    tau_negative: Positive = 1.05
    """How fast the gradient decreases for labels with negative advantages."""


class GmpoLoss(Clipped):
    type: Literal["gmpo"]
    """The geometric mean of the clipped importance ratios of a document's labels."""
    normalize_by: NormalizeBy = "document_means"
    epsilon_low: NotNegative = 0.4
    epsilon_high: NotNegative = 0.4


class DppoLoss(PolicyLoss):
    type: Literal["dppo"]
    """Masks labels whose probability has moved too far from the old one, if the update would move it further."""
    divergence: Literal["tv", "kl"] = "tv"
    """How far a label's probability has moved. `tv`: |new - old|. `kl`: the KL divergence of the old from the new
    distribution, of the label against all other tokens."""
    threshold: Positive = 0.2
    """Labels with a larger divergence are masked."""


class CrossEntropyLoss(LossBase):
    type: Literal["cross_entropy"]
    """Supervised learning, without advantages or the sampler's log-probs."""
    supervised: ClassVar[bool] = True


class CustomLoss(PolicyLoss):
    type: Literal["custom"]
    """Your own loss, by import path, or an object in Python."""
    function: str
    """Your loss, as package.module:Class: a frozen dataclass derived from
    truestep.losses.label_losses.LabelLoss. Its fields are its options."""
    options: dict[str, Any] | None = None
    """The options of your loss, by the names of its fields. They are checked like other options."""

    @cached_property
    def custom(self) -> Any:
        """Make the loss from its options. This imports the user's module."""
        return make_custom_loss(self.function, self.options or {})

    @property
    def supervised(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.custom, "supervised", False))

    @model_validator(mode="after")
    def _can_be_made(self) -> "CustomLoss":
        try:
            self.custom  # noqa: B018
        except CustomError as error:
            raise ValueError(str(error).removeprefix("loss.")) from error
        corrected = [name for name in PolicyLoss.__annotations__ if getattr(self, name) not in (None, "sampler")]
        if self.supervised and corrected:
            raise ValueError(f"{corrected[0]} corrects a policy loss, and {self.function} is supervised")
        if self.correction is not None and self.correction.level == "label" and self._of_whole_documents:
            raise ValueError(
                f"correction.level: label gives each label a weight of its own, and {self.function} is a loss of "
                "whole documents; take level: document or document_mean"
            )
        if self.clip_cov is not None and self._of_whole_documents:
            raise ValueError(
                f"clip_cov takes single labels out of a document, and {self.function} is a loss of whole documents; "
                "take kl_cov"
            )
        return self

    @property
    def _of_whole_documents(self) -> bool:
        return bool(getattr(self.custom, "whole_documents", False))


LOSSES_OF_OTHERS = {"ppo": "grpo"}  # names in other programs for the same loss

LossConfig = Annotated[
    Annotated[GrpoLoss, Tag("grpo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[SapoLoss, Tag("sapo")]
    | Annotated[GmpoLoss, Tag("gmpo")]
    | Annotated[DppoLoss, Tag("dppo")]
    | Annotated[CrossEntropyLoss, Tag("cross_entropy")]
    | Annotated[CustomLoss, Tag("custom")],
    by_type("grpo"),
]


def default_loss() -> GrpoLoss:
    return GrpoLoss()
