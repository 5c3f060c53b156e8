"""What a call writes and allocates, measured; see `inlay.state.watch`."""

from inlay.state.watch import Moved, paged, watch

__all__ = ["Moved", "paged", "watch"]
