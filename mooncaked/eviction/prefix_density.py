"""How much a unit is worth, learnt from what became of others like it.

Of each group of units it is counted how many reached an age unused, and how many were used at that age.
That gives the chance of a use at each age; a small group borrows from the wider ones around it. The worth
of a unit at its age is the best ratio, over all times that one might keep it from now on, of the chance
that it is used by then to the time that it takes up room until it is used or given up: hits per block and
touch.

A use does not always go to the end of a unit, so the worth of its last blocks is lower: by the chance,
learnt as well, that a use comes that far.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncaked.eviction.prefix_units import AGE_BINS, Unit, age_bin

Floats = NDArray[np.float64]

_DISTANCES = (0, 1, 2, 4, 8, 16, 32, 64)  # from a unit's end; the chance to be used is learnt for each
_STEPS = 4  # of worth, in each age bin
_TURNS = 9
_KINDS = 4
_BORROWED = 8.0  # units of the wider group that count as seen in the narrower one
_EDGES = np.array([2.0 ** (b // 2 - 1) * (1.0 + 0.5 * (b % 2)) for b in range(AGE_BINS + 1)])  # touches
_WIDTHS = np.diff(_EDGES)
_DEFAULT: list[float] = (1.0 / np.repeat(_EDGES[:-1], _STEPS)).tolist()


class Density:
    """Tables of what was seen, which fade, and the worth computed from them."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int, int], int] = {}
        self._tails: dict[tuple[int, int], int] = {}
        self._outlived: list[list[float]] = []  # by group and age bin: units that reached it unused
        self._used: list[list[float]] = []  # and those of them that were used in it
        self._reached: list[list[float]] = []  # by tail group and distance from the end: uses that came there
        self._uses: list[list[float]] = []  # of units that long
        self._worth: list[list[float]] = []  # by group and step of age
        self._share: list[list[float]] = []  # by tail group and distance

    def place(self, unit: Unit[Any]) -> None:
        """Put a unit into the groups to which it belongs now."""
        group, tail = unit.classify()
        number = self._groups.get(group)
        if number is None:
            number = self._groups[group] = len(self._groups)
            self._outlived.append([0.0] * AGE_BINS)
            self._used.append([0.0] * AGE_BINS)
            self._worth.append(_DEFAULT)
        unit.group = number
        number = self._tails.get(tail)
        if number is None:
            number = self._tails[tail] = len(self._tails)
            self._reached.append([0.0] * len(_DISTANCES))
            self._uses.append([0.0] * len(_DISTANCES))
            self._share.append([1.0] * len(_DISTANCES))
        unit.tail = number

    def saw_unused(self, unit: Unit[Any], age: int) -> None:
        """A unit reached an age without a use."""
        now = age_bin(age)
        if now > unit.credited:
            row = self._outlived[unit.group]
            row[unit.credited] += 0.5
            row[now] += 0.5
            for b in range(unit.credited + 1, now):
                row[b] += 1.0
            unit.credited = now

    def saw_use(self, unit: Unit[Any], age: int) -> None:
        """A unit was used at an age."""
        self.saw_unused(unit, age)
        b = age_bin(age)
        self._outlived[unit.group][b] += 0.5
        self._used[unit.group][b] += 1.0
        unit.credited = 0

    def saw_reach(self, unit: Unit[Any], lost: int) -> None:
        """A use went to the end of a unit but for the last `lost` blocks."""
        reached, uses = self._reached[unit.tail], self._uses[unit.tail]
        size = unit.full - unit.start
        for i, distance in enumerate(_DISTANCES):
            if distance >= size:
                break
            uses[i] += 1.0
            if distance >= lost:
                reached[i] += 1.0

    def worth(self, unit: Unit[Any], age: int) -> float:
        """Of the last block that a unit has."""
        length = age.bit_length()
        step = 8 * length + ((age << 4 >> length) & 7)
        row = self._worth[unit.group]
        value = row[step] if step < len(row) else row[-1]
        gone = len(unit.marks)
        return value * self._share[unit.tail][min(gone.bit_length(), len(_DISTANCES) - 1)]

    def learn(self, fade: float) -> None:
        """Compute worths from what was seen up to now; then let it count for `fade` of what it did."""
        if self._groups:
            outlived, used = np.array(self._outlived), np.array(self._used)
            points = _best_ratio(self._rates(outlived, used))
            self._worth = _refine(points).tolist()
            self._outlived, self._used = (outlived * fade).tolist(), (used * fade).tolist()
            reached, uses = np.array(self._reached), np.array(self._uses)
            self._share = ((reached + 4.0) / (uses + 4.0)).tolist()
            self._reached, self._uses = (reached * fade).tolist(), (uses * fade).tolist()

    def _rates(self, outlived: Floats, used: Floats) -> Floats:
        """Chance of a use in each age bin by group, where a group borrows from those of its kind and turn,
        these from those of its kind, and these from all."""
        kinds = np.array([kind for kind, _, _ in self._groups])
        turns = np.array([kind * _TURNS + turn for kind, turn, _ in self._groups])
        everything = np.zeros(len(kinds), dtype=np.intp)
        wider = np.full((1, AGE_BINS), 0.1)
        strength = 2.0
        for labels, count in ((everything, 1), (kinds, _KINDS), (turns, _KINDS * _TURNS)):
            seen, hits = np.zeros((count, AGE_BINS)), np.zeros((count, AGE_BINS))
            np.add.at(seen, labels, outlived)
            np.add.at(hits, labels, used)
            if count > 1:
                wider = wider[np.arange(count) // (count // len(wider))]
            wider = (hits + strength * wider) / (seen + strength)
            strength = _BORROWED
        return np.asarray((used + strength * wider[turns]) / (outlived + strength))


def _best_ratio(rates: Floats) -> Floats:
    """From the start of each bin on, the best over all horizons of P(use by then) / E[touches until use or
    horizon]. It pays to wait for the next bin as long as the ratio is better from there on."""
    out = np.empty_like(rates)
    chance, wait = np.zeros(len(rates)), np.ones(len(rates))
    for b in reversed(range(AGE_BINS)):
        rate = rates[:, b]
        here, width = rate, _WIDTHS[b] * (1.0 - rate / 2)
        on = chance * width > here * wait
        here = np.where(on, here + (1.0 - rate) * chance, here)
        width = np.where(on, width + (1.0 - rate) * wait, width)
        chance, wait = here, width
        out[:, b] = here / width
    return out


def _refine(points: Floats) -> Floats:
    """Steps between the bins' starts, on straight lines."""
    after = np.concatenate([points[:, 1:], points[:, -1:]], axis=1)
    parts = (np.arange(_STEPS) / _STEPS)[None, None, :]
    return np.asarray((points[:, :, None] * (1 - parts) + after[:, :, None] * parts).reshape(len(points), -1))
