"""A self-test of the Gluon product against torch on this machine. A compiler bug would otherwise go unnoticed."""

import torch

from truestep.head.hopper_product import multiply
from truestep.head.numerators import PART, SLACK

_ROWS, _HIDDEN, _VOCABULARY = 200, 200, 700  # gives full and partial tiles
_TOLERANCE = 1e-4


def wrong(device: torch.device) -> str | None:
    """Return a description of the first wrong output of the product on this device; None if all are right."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, _HIDDEN, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(_VOCABULARY, _HIDDEN, generator=generator).to(device, torch.bfloat16)
    labels = torch.randint(_VOCABULARY, (_ROWS,), generator=generator).to(device)
    factor = (0.02 + torch.rand(_ROWS, generator=generator)).to(device)
    # some logits are far above the label's, which tests shifts
    y = (hidden.double() @ weight.double().T) * factor[:, None]
    reference = y.gather(1, labels[:, None]).squeeze(1)
    found = multiply(hidden, weight, labels, factor, reference.float(), keep=True)
    assert found.values is not None
    y -= reference[:, None]
    for part in range(found.shift.shape[1]):
        columns = slice(part * PART, (part + 1) * PART)
        shift = (y[:, columns].amax(1) - SLACK).clamp(min=0)
        shifted = y[:, columns] - shift[:, None]
        numerators = shifted.exp2()
        for name, actual, expected, tolerance in (
            ("shift", found.shift[:, part], shift, _TOLERANCE),
            ("sum", found.total[:, part], numerators.sum(1), _TOLERANCE),
            ("weighted sum", found.weighted[:, part], (numerators * shifted).sum(1), _TOLERANCE),
            ("numerators", found.values[:, columns], numerators, 2**-7),
        ):
            error = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
            if not error <= tolerance:
                return f"{name} of part {part}: off by {error:.1e}"
    return None if float(found.label.abs().max()) <= _TOLERANCE else "labels"
