"""Checks that the experts in records exist in the model that replays them."""

import numpy as np

from truestep.rollouts.values import BadRecord
from truestep.types import ROUTES, RouteShape

_OFF = "model.experts.replay: off does not read them"


def check_routes(values: np.ndarray | None, num_tokens: int, model: RouteShape) -> None:
    """Raise `BadRecord` if the experts of a sequence's tokens, [rows, layers, k], do not fit the model."""
    rows = 0 if values is None else len(values)
    if model.required and rows < num_tokens - 1:
        raise BadRecord(
            f"{ROUTES} has {rows} rows: model.experts.replay: require needs {num_tokens - 1}, one for each token but "
            "the last"
        )
    if values is None:
        return
    layers, chosen = values.shape[1:]
    if not model.experts:
        raise BadRecord(f"{ROUTES} is given, but {model.name} has no layer that can replay it: {_OFF}")
    if layers != len(model.experts):
        raise BadRecord(
            f"{ROUTES} has {layers} layers: {model.name} routes in {len(model.experts)}, and layers that do not route "
            "have no row"
        )
    if chosen != model.chosen:
        raise BadRecord(f"{ROUTES} has {chosen} experts of a token: {model.name} chooses {model.chosen}")
    beyond = (values < 0) | (values >= np.array(model.experts)[:, None])
    if beyond.any():
        row, layer, place = (int(index) for index in np.argwhere(beyond)[0])
        raise BadRecord(
            f"{ROUTES}[{row}][{layer}][{place}] is {values[row, layer, place]}: {model.name} has "
            f"{model.experts[layer]} experts in a layer"
        )
    ordered = np.sort(values, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if twice.any():
        row, layer = (int(index) for index in np.argwhere(twice)[0])
        raise BadRecord(f"{ROUTES}[{row}][{layer}] names an expert twice")
