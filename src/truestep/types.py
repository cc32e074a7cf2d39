"""The data types that stages exchange. They are frozen: a stage returns a new value and does not edit its input.

Dimensions: L tokens of one document, S tokens of a packed micro-batch (padding included), T its labels, D documents.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, InitVar, dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from itertools import chain, pairwise
from struct import Struct
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from truestep.text import printable

if TYPE_CHECKING:  # reward processes import this file, and must not import torch
    import torch

# The value of `data.share_prefixes`.
ShareMode = Literal["auto", "always", "off"]
# A difference of rewards must be finite in float32.
LARGEST_REWARD = 1e38
_AT_ONCE = 2048  # documents that are counted while the processor's cache holds them
# Numbers of tokens, labels and `starts`, which stand behind a digest of so many bytes.
_SIZES, _DIGEST = Struct("<III"), 8
LONGEST_REASON = 1000  # the largest number of characters of `Rejected.reason`


@dataclass(frozen=True)
class Turn:
    """A span of a document's tokens: one completion of the policy, or a reply to it (by a tool or a user)."""

    start: int
    end: int
    role: str
    reward: float | None = None


@dataclass(frozen=True)
class Membership:
    """Facts about a whole document that each of its sequences needs."""

    num_labels: int  # number of labels in the whole document
    counts: bool  # True for one sequence of the document: the first with labels, or else the first
    others_have_advantage: bool  # True if a label of another sequence has a nonzero advantage


@dataclass(frozen=True, eq=False)
class Rollout:
    """One document. Example: prompt `[5, 6]`, completion `[7, 8]`: loss_mask = [F, F, T, T].

    If a document has several sequences, their tokens are concatenated, and `starts` has each one's first index.
    """

    id: str
    input_ids: np.ndarray  # [L] int64
    loss_mask: np.ndarray  # [L] bool; never set at the first position of a sequence
    logprobs: np.ndarray | None = None  # [L] float32, the sampler's; 0 outside the mask
    advantages: np.ndarray | None = None  # [L] float32; 0 outside the mask
    reward: float | None = None
    group_id: str | None = None
    temperature: float = 1.0
    # [L] int64; the version of the policy that sampled each token: the number of documents it had been trained on
    model_version: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None  # [L] float32, a reference's or a teacher's; 0 outside the mask
    # [L] float32, computed by the trainer with the weights before the first update on this document; 0 outside the mask
    recomputed_logprobs: np.ndarray | None = None
    chosen: np.ndarray | None = None  # [L] uint8; 1: chosen by loss.clip_cov or loss.kl_cov in this step
    targets: np.ndarray | None = None  # [L] int64: the token to score at each label; None: the document's own
    truncated: bool | None = None  # the document ended at a length limit; None: unknown
    rewards: Mapping[str, float] = field(default_factory=dict)  # the parts of the reward, by name
    # The reward minus the group's baseline, until advantages are scaled over the whole step; None afterwards or without
    # it.
    difference: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # The document's other fields by name, from `rollouts/fields.py` and the user's `data.fields`.
    fields: Mapping[str, np.ndarray] = field(default_factory=dict)  # [L], per label; 0 outside the mask
    # [L, ...], per token; the last token's may be missing
    token_fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    document_fields: Mapping[str, np.ndarray] = field(default_factory=dict)  # [], per document
    turns: tuple[Turn, ...] = ()
    # For a document made of several records with a `document_id`: the first token and the record's id of each sequence.
    starts: tuple[int, ...] = ()
    record_ids: tuple[str, ...] = ()
    # For a record with a `document_id`, before it is joined with the document's other records.
    document_id: str | None = None
    num_sequences: int | None = None
    one_advantage: float | None = None  # the record's advantage, if it is one number
    membership: Membership | None = None  # set for a sequence returned by `sequences`; None: this is a whole document

    def __post_init__(self) -> None:
        # Found once, when the document is made, and not for each plan. Python keeps an object's attributes without a
        # dictionary of its own if they are at most 29 and none was set by way of `__dict__`, as `cached_property` does.
        # A pass over many documents then takes half of the time.
        for name in ("num_tokens", "facts"):
            object.__setattr__(self, name, getattr(Rollout, name).func(self))

    def value(self, name: str) -> Any:
        """Return a field by its name: an attribute, or an entry of the mappings in `PLACES`; None if it is missing."""
        if name in _ATTRIBUTES:  # faster than getattr; this is called for every field of every document
            return self.__dict__[name]
        return next((held[name] for held in (getattr(self, place) for place in PLACES) if name in held), None)

    def with_values(self, values: Mapping[str, Any]) -> Rollout:
        """Return a copy with new values of label fields."""
        own = {name: value for name, value in values.items() if name in _ATTRIBUTES}
        others = {name: value for name, value in values.items() if name not in _ATTRIBUTES}
        return replace(self, **own, fields={**self.fields, **others})

    @cached_property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_labels(self) -> int:
        return int(_SIZES.unpack_from(self.facts, _DIGEST)[1])

    @cached_property
    def facts(self) -> bytes:
        """The facts about the document that ranks compare when they plan a step: a row of `facts_of`."""
        digest = blake2b(self.id.encode(errors="surrogatepass"), digest_size=_DIGEST).digest()
        labels = np.count_nonzero(self.loss_mask)  # much faster than a sum
        return digest + _SIZES.pack(self.num_tokens, labels, len(self.starts))

    @cached_property
    def completion(self) -> bytes:
        """The token ids of the labels as bytes, for comparing completions."""
        return self.input_ids[self.loss_mask].tobytes()

    @property
    def sequences(self) -> tuple[Rollout, ...]:
        """The document's sequences, each with the id of its record. A document of one record is its own sequence."""
        return self._sequences if self.starts else (self,)

    @cached_property
    def _sequences(self) -> tuple[Rollout, ...]:
        spans = [slice(*bounds) for bounds in pairwise((*self.starts, self.num_tokens))]
        labels = [int(self.loss_mask[span].sum()) for span in spans]
        trained = [self.advantages is not None and bool(self.advantages[span].any()) for span in spans]
        counts = next((number for number, count in enumerate(labels) if count), 0)
        return tuple(
            self._sequence(number, span, Membership(sum(labels), number == counts, sum(trained) > trained[number]))
            for number, span in enumerate(spans)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_sequences", "completion")}

    def _sequence(self, number: int, span: slice, membership: Membership) -> Rollout:
        """Return one sequence: its part of every array, and the document's other values."""
        own: dict[str, Any] = {name: value[span] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        for name in ("fields", "token_fields"):
            own[name] = {key: values[span] for key, values in getattr(self, name).items()}
        first, last = (bisect_left(self.turns, place, key=lambda turn: turn.start) for place in (span.start, span.stop))
        turns = tuple(
            replace(turn, start=turn.start - span.start, end=turn.end - span.start) for turn in self.turns[first:last]
        )
        own |= {"turns": turns, "starts": (), "record_ids": (), "membership": membership}
        return replace(self, id=self.record_ids[number], **own)


@dataclass(frozen=True)
class RouteShape:
    """The required shape of `routed_experts` for a model. Without routing replay, `experts` is empty."""

    experts: tuple[int, ...]  # number of experts in each layer with a router
    chosen: int  # experts per token in each of these layers
    required: bool = False  # True: every record must have routed_experts
    name: str = "the model"  # the model's class, for messages
    numbers: tuple[int, ...] = ()  # indices of these layers among all hidden layers, from 0
    layers: int = 0  # number of all hidden layers


NO_ROUTES = RouteShape((), 0)
ROUTES = "routed_experts"  # the per-token field with the chosen experts


# A digest of the document's id, and its numbers of tokens, labels and `starts`: 0 for a document that is a record.
_FACTS = np.dtype([("id", "<u8"), ("tokens", "<u4"), ("labels", "<u4"), ("starts", "<u4")])


def facts_of(documents: Sequence[Rollout]) -> np.ndarray:  # [D] _FACTS
    """Return a table of documents. A step has hundreds of thousands: this is the only pass over them for all counts."""
    starts = range(0, len(documents), _AT_ONCE)
    some = [b"".join([document.facts for document in documents[start : start + _AT_ONCE]]) for start in starts]
    return np.frombuffer(b"".join(some), _FACTS)


def sequences_of(documents: Iterable[Rollout]) -> tuple[Rollout, ...]:
    """Return the sequences of documents, in order."""
    return tuple(chain.from_iterable(each.sequences if each.starts else (each,) for each in documents))


# the mappings that hold fields which are not attributes of a rollout
PLACES = ("fields", "token_fields", "document_fields")
CACHED = frozenset(name for name, value in vars(Rollout).items() if isinstance(value, cached_property))
_ATTRIBUTES = frozenset(item.name for item in fields(Rollout))


@dataclass(frozen=True)
class Rejected:
    """A record that cannot be trained on, and the reason."""

    file: str
    line: int  # 1-based line of a JSONL file, or row of a Parquet file
    reason: str
    id: str | None = None
    group_id: str | None = None  # if known; a rejected record still counts as a member of its group
    prompt: str | None = None  # the text of the prompt, if a sampled completion was rejected
    completion: str | None = None  # the text of this completion
    traceback: str | None = None  # the traceback of a reward that raised

    def __post_init__(self) -> None:
        # A reason may quote untrusted text: a reward's exception, or a server's response.
        object.__setattr__(self, "reason", printable(self.reason, LONGEST_REASON))


@dataclass(frozen=True)
class PutAside:
    """A valid document that is not trained on, and the reason."""

    id: str
    reason: str
    group_id: str | None = None


@dataclass(frozen=True)
class StepTotals:
    """Counts over the whole step, known before its first backward pass. All denominators of the loss are computed from
    them."""

    num_documents: int  # D, documents without labels included
    num_labels: int  # N
    num_tokens: int


@dataclass(frozen=True)
class Sharing:
    """How sequences in a micro-batch share common prefixes."""

    least: int = 1  # smallest number of tokens that a shared segment must save
    budget: int | None = None  # if a micro-batch exceeds this number of tokens, everything that can be shared is shared
    alike: tuple[str, ...] = ()  # per-token fields that must be equal, too, in shared tokens


@dataclass(frozen=True)
class StepPlan:
    """The documents of one step, and their packing into micro-batches. Made on the host, without the model."""

    documents: tuple[Rollout, ...]  # in the order of the data
    # Indices into `sequences`. A micro-batch is one forward pass, and may be empty. Micro-batch k · ranks + r is the
    # k-th micro-batch of rank r.
    micro_batches: tuple[tuple[int, ...], ...]
    totals: StepTotals
    documents_seen: int  # documents trained on before this step
    ranks: int = 1
    repeated: bool = False  # an earlier update trained on the same documents
    sharing: Sharing | None = None  # None: each sequence is computed alone
    # The number of computed tokens if each shared prefix were computed once in the step. None: not known, or sharing
    # would save no time.
    distinct: int | None = None
    # Cache of `prefixes.forest_of`: the segments of each micro-batch, by its members.
    forests: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False, repr=False)
    facts: np.ndarray = field(init=False, compare=False, repr=False)  # `facts_of` the documents
    known: InitVar[np.ndarray | None] = None  # these facts, if they are known already

    def __post_init__(self, known: np.ndarray | None) -> None:
        object.__setattr__(self, "facts", facts_of(self.documents) if known is None else known)
        if not np.array_equal(np.sort(self.packed), np.arange(len(self.sequences))):
            raise ValueError("a plan packs each sequence of its documents exactly once")
        if len(self.micro_batches) % self.ranks:
            raise ValueError("a plan gives every rank the same number of micro-batches")

    @cached_property
    def sequences(self) -> tuple[Rollout, ...]:
        """The sequences of all documents, in order."""
        return sequences_of(self.documents) if self.facts["starts"].any() else self.documents

    @cached_property
    def packed(self) -> np.ndarray:
        """The members of all micro-batches, one after another."""
        return np.fromiter(chain.from_iterable(self.micro_batches), np.int64)

    @cached_property
    def document_of(self) -> Sequence[int]:
        """The index in `documents` of each sequence's document."""
        if len(self.sequences) == len(self.documents):
            return range(len(self.documents))
        sequences = np.maximum(self.facts["starts"], 1)
        return tuple(np.repeat(np.arange(len(self.documents)), sequences).tolist())

    @property
    def documents_seen_after(self) -> int:
        return self.documents_seen + self.totals.num_documents

    def of_rank(self, rank: int) -> tuple[tuple[int, ...], ...]:
        return self.micro_batches[rank :: self.ranks]

    def at_once(self, number: int) -> tuple[tuple[int, ...], ...]:
        """Return the `number`-th micro-batch of every rank; the ranks run these at the same time."""
        return self.micro_batches[number * self.ranks : (number + 1) * self.ranks]


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without a host-device sync. For a GPU the tensor is pinned first."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Packed segments, the input of the model. Padding is a segment at the end.

    A segment is a whole sequence, or the tokens that continue a parent segment: sequences with the same first tokens
    share these (`rollouts/prefixes.py`). A parent comes before its children.
    """

    input_ids: torch.Tensor  # [S] int64
    position_ids: torch.Tensor  # [S] int64, from 0 in each sequence
    # [G + 1] int32, or [G + 2] with padding: cumulative lengths, from 0 to S. It stays on the host, which prepares
    # attention.
    segments: torch.Tensor
    num_segments: int  # G, without padding
    parents: tuple[int, ...] = ()  # [G] the parent of each segment, -1 for none; empty if no segment has one
    sequences: torch.Tensor | None = None  # [S] int64: number of sequences that share each token; None: one each
    # [S, ...] by name: the requested per-token fields that at least one document has.
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens without padding."""
        return int(self.segments[self.num_segments])

    def to(self, device: torch.device) -> PackedTokens:
        input_ids, position_ids = (sent(ids, device) for ids in (self.input_ids, self.position_ids))
        others = {name: sent(values, device) for name, values in self.fields.items()}
        sequences = None if self.sequences is None else sent(self.sequences, device)
        return replace(self, input_ids=input_ids, position_ids=position_ids, sequences=sequences, fields=others)

    def fields_of(self, here: slice) -> dict[str, torch.Tensor]:
        """Return the token fields of the slice `here`, for a rank that has this slice of the tokens."""
        return {name: values[here] for name, values in self.fields.items()}


def per_label() -> Mapping[str, Any]:
    """Return field metadata that marks a tensor as [T]."""
    return {"per_label": True}


@dataclass(frozen=True, eq=False)
class PackedLabels:
    """The data of a micro-batch's T labels, in order, and of its D sequences.

    A document is one sequence, or several, which may be in other micro-batches and on other ranks. Then `document`,
    `num_labels` and the sums over documents are per sequence.

    The hidden state at position t - 1 predicts the token at t: `rows` holds t - 1, shifted before tokens are divided
    over ranks. Example: documents `[5, 6, 7]` and `[8, 9]`, each with its last token as label: rows = [1, 3], ids = [7,
    9]. Where sequences with a shared prefix diverge, one row predicts a label of each.
    """

    rows: torch.Tensor = field(metadata=per_label())  # index into S of the predicting position
    ids: torch.Tensor = field(metadata=per_label())
    document: torch.Tensor = field(metadata=per_label())  # index into D
    temperature: torch.Tensor = field(metadata=per_label())
    old_logprobs: torch.Tensor = field(metadata=per_label())
    advantages: torch.Tensor = field(metadata=per_label())
    model_version: torch.Tensor = field(metadata=per_label())
    recomputed_logprobs: torch.Tensor = field(metadata=per_label())
    reference_logprobs: torch.Tensor = field(metadata=per_label())
    chosen: torch.Tensor = field(metadata=per_label())  # 1: chosen by loss.clip_cov or loss.kl_cov
    # Per sequence. Metrics and denominators over documents use `document_labels` and `counts`.
    num_labels: torch.Tensor  # [D] int64
    document_labels: torch.Tensor  # [D] int64: labels of the whole document, in all its sequences
    counts: torch.Tensor  # [D] bool: True for one sequence of each document
    # [D] bool: True if a label of another sequence of the document has a nonzero advantage
    others_have_advantage: torch.Tensor
    reward: torch.Tensor  # [D] float32; 0 for a document without a reward
    rewards: Mapping[str, torch.Tensor]  # [D] float32 by the name of the reward's part; NaN for a document without it
    truncated: torch.Tensor  # [D] bool; False if unknown
    has: Mapping[str, torch.Tensor]  # [D] bool by rollout field: True if the document has the field
    # The other fields by name, from `rollouts/fields.py` and the user's `data.fields`.
    fields: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)  # [T]
    document_fields: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)  # [D]

    @classmethod
    def label_fields(cls) -> list[Field[Any]]:
        """Return the dataclass fields with a value per label."""
        return [item for item in fields(cls) if item.metadata.get("per_label")]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, labels: slice | torch.Tensor) -> Self:
        """Select some of the labels, and keep all documents."""
        chosen = {item.name: getattr(self, item.name)[labels] for item in self.label_fields()}
        return replace(self, **chosen, fields={name: values[labels] for name, values in self.fields.items()})

    def to(self, device: torch.device) -> Self:
        return replace(self, **{item.name: _sent(getattr(self, item.name), device) for item in fields(self)})


def _sent(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return {name: _sent(item, device) for name, item in value.items()}
    return sent(value, device)


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One micro-batch: the input tokens and the labels."""

    tokens: PackedTokens
    labels: PackedLabels

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(self.tokens.to(device), self.labels.to(device))


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of rows of logits, computed by the head."""

    logprobs: torch.Tensor  # [T] log-prob of the label
    entropy: torch.Tensor  # [T]
    logsumexp: torch.Tensor  # [T]


@dataclass(frozen=True)
class Coefficients:
    """Coefficients of a loss's gradient to a row of logits with softmax p: `p · (a + b · log p) - c · onehot(y)`."""

    a: torch.Tensor  # [T]
    b: torch.Tensor | None  # [T]; None if all are zero
    c: torch.Tensor  # [T]

    @property
    def active(self) -> torch.Tensor:  # [T] bool
        """True for rows with a nonzero gradient."""
        nonzero = (self.a != 0) | (self.c != 0)
        return nonzero if self.b is None else nonzero | (self.b != 0)

    def __getitem__(self, rows: slice) -> Coefficients:
        return Coefficients(self.a[rows], None if self.b is None else self.b[rows], self.c[rows])


@dataclass(frozen=True, eq=False)
class DocumentScore:
    """The policy's log-probs and entropies of one document's labels, in order."""

    id: str
    logprobs: np.ndarray  # [labels of the document] float32
    entropy: np.ndarray  # [labels of the document] float32
