"""Resolves an adapter's origin (options, directory or checkpoint), and attaches the adapter to a model."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from truestep.config.sections import AdapterConfig
from truestep.model.adapter import (
    Adapter,
    AdapterSettings,
    AdapterSource,
    LoraLinear,
    attach,
    first_values,
    target_modules,
)
from truestep.model.adapter_files import is_adapter, read_adapter
from truestep.model.towers import text_adapter
from truestep.weights.errors import ModelError


def adapter_source(adapter: AdapterConfig | None, seed: int, checkpoint: Path | None = None) -> AdapterSource | None:
    """Return the adapter's origin: a checkpoint, a directory, or options. None: no adapter."""
    if checkpoint is not None and is_adapter(checkpoint) != (adapter is not None):
        has, lacks = ("an adapter", "no section adapter") if adapter is None else ("a whole model", "an adapter")
        raise ModelError(f"adapter: {checkpoint} holds {has}, and the configuration has {lacks}")
    if adapter is None:
        return None
    path = None if adapter.path is None else Path(adapter.path)
    settings = None
    if path is None:
        settings = AdapterSettings(adapter.rank, adapter.alpha, adapter.targets, seed)
    return AdapterSource(settings, checkpoint or path)


def attach_adapter(model: Any, source: AdapterSource) -> Adapter:
    """Attach a new or a stored adapter to a model, in place. The adapter's weights stay unread."""
    settings = source.settings
    modules = None if settings is None else target_modules(model, settings.targets)
    if source.path is None:
        assert settings is not None and modules is not None
        adapter = Adapter(settings.rank, settings.alpha, modules)
        values = first_values(settings.seed)
    else:
        adapter, values = text_adapter(model, *read_adapter(source.path))
        stored = target_modules(model, adapter.modules)  # raises if the model has no such layer
        adapter = dataclasses.replace(adapter, modules=stored)
        if settings is not None and modules is not None:
            wanted = {"rank": settings.rank, "alpha": settings.alpha, "targets": sorted(modules)}
            found = {"rank": adapter.rank, "alpha": adapter.alpha, "targets": sorted(stored)}
            for name, value in wanted.items():
                if found[name] != value:
                    what = f"{value}, and it has {found[name]}" if name != "targets" else "other layers than it has"
                    raise ModelError(f"the adapter {source.path} does not fit adapter.{name}, which asks for {what}")
    attach(model, adapter, values)
    return adapter


@contextmanager
def adapters_called(model: Any) -> Iterator[None]:
    """Refuse an adapter on a layer that the model does not call within the block. Such a model reads the layer's weight
    itself, so the adapter would do nothing. Among layers whose names differ only in numbers, such as experts, one call
    is enough."""
    layers = {
        module: re.sub(r"\d+", "*", name) for name, module in model.named_modules() if isinstance(module, LoraLinear)
    }
    called: set[str] = set()
    hooks = [layer.register_forward_pre_hook(lambda layer, _: called.add(layers[layer])) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if missed := sorted(set(layers.values()) - called):
        raise ModelError(
            f"adapter.targets: {type(model).__name__} reads the weight of {missed[0]} and does not call the layer: an "
            "adapter on it would do nothing. Name the other layers"
        )
