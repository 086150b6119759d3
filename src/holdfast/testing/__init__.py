"""What tests of training runs need: real ranks with deadlines, and tiny models made offline. For users' tests too."""

from __future__ import annotations

from holdfast.testing.pool import Died, RankFailure, RankPool

__all__ = ["Died", "RankFailure", "RankPool"]
