"""How models turn heads by their places, and ways that look like it."""

import torch


def turn(how: str, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:  # [.., 4]
    first, second = x[..., :2], x[..., 2:]
    if how == "pairs":
        first, second = x[..., ::2], x[..., 1::2]
    half = torch.cat([first, -second] if how == "backwards" else [-second, first], -1)
    return sine * half + cosine * x if how == "other order" else x * cosine + half * sine
