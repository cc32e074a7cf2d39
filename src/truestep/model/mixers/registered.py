"""The operations of recurrent layers that truestep brings, by the names of the functions in transformers' models."""

from truestep.model.mixers.convolution import Convolution
from truestep.model.mixers.recurrence import Recurrence, put_in, register

__all__ = ["put_in"]

# None: a kernel that does the work of several functions in training mode, for which models have no plain code.
FUNCTIONS: dict[str, Recurrence | None] = {
    "causal_conv1d_fn": Convolution(),
    "mamba2_split_conv1d_scan_combined": None,
    "mamba_inner_fn": None,
}

for _name, _recurrence in FUNCTIONS.items():
    register(_name, _recurrence)
