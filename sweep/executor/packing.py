"""Which of the launches that wait for devices starts now.

In this order: devices are used up rather than left idle; a checkpoint that is in memory already is read again rather
than another; a launch takes the place that fits it exactly; the order of waiting. Two rules come before all of them:
whoever was overtaken `MAX_OVERTAKEN` times goes next and devices are kept for it, and a checkpoint that is not on this
node is obtained by one launch at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

# A launch that needs more devices than are free lets this many others pass; then devices are kept for it.
MAX_OVERTAKEN = 3


@dataclass(frozen=True)
class Waiting:
    """A launch that waits. overtaken: how many that came later started before it."""

    devices: int
    checkpoint: str
    overtaken: int = 0


@dataclass(frozen=True)
class NodeState:
    """free: devices. in_memory: checkpoints that were read a moment ago. obtained: those that are on the node's disk.
    obtaining: those that a launch is fetching for the first time.
    """

    free: int
    in_memory: AbstractSet[str] = frozenset()
    obtained: AbstractSet[str] = frozenset()
    obtaining: AbstractSet[str] = frozenset()

    def may_read(self, checkpoint: str) -> bool:
        return checkpoint in self.obtained or not self.obtaining


def choose(waiting: Sequence[Waiting], node: NodeState) -> int | None:
    """Index of the launch to start now, or None where it is better or necessary to wait."""
    kept_for = next((i for i, w in enumerate(waiting) if w.overtaken >= MAX_OVERTAKEN), None)
    candidates = range(len(waiting)) if kept_for is None else [kept_for]
    fitting = [i for i in candidates if waiting[i].devices <= node.free and node.may_read(waiting[i].checkpoint)]
    return min(fitting, key=lambda i: (*_preference(waiting, i, node), i), default=None)


def _preference(waiting: Sequence[Waiting], index: int, node: NodeState) -> tuple[int, bool, bool]:
    mine = waiting[index]
    others = [w.devices for i, w in enumerate(waiting) if i != index and node.may_read(w.checkpoint)]
    left = node.free - mine.devices
    return left - _most(others, left), mine.checkpoint not in node.in_memory, left != 0


def _most(widths: Sequence[int], free: int) -> int:
    """The largest number of devices, at most `free`, that some of these launches take together."""
    sums = {0}
    for width in widths:
        sums |= {total + width for total in sums if total + width <= free}
    return max(sums)
