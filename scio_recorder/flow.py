"""Whether a net's control flow depends on the values of its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_static_flow"]


def check_static_flow(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, mode: str = "eval"
) -> None:
    """Refuse a net whose control flow depends on the data."""
