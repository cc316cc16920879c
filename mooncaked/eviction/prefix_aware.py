"""Our own policy: what goes is what others like it were least often used for, per block and time.

Blocks are taken together as units, runs of a chain that were last used together (`prefix_units`). What a
unit is worth is learnt from the fate of units like it, those that are present and those that went already
(`prefix_density`). The unit of the lowest worth loses its blocks, the last one first.

Worth changes with age. The heap of units by worth holds what it was when a unit was last looked at; a worth
that has risen since is found out when the unit comes to the top, one that has fallen when the unit has its
turn to be looked at, a few of them with each eviction. So a touch or an eviction costs O(log n) amortised.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic

from mooncaked.errors import IntegrityError
from mooncaked.eviction.base import B, Names, follows, free
from mooncaked.eviction.duel import Duel
from mooncaked.eviction.ghosts import Ghosts
from mooncaked.eviction.prefix_density import Density
from mooncaked.eviction.prefix_units import TURNS_MAX, Kind, Unit, age_bin, mark

_AT_ONCE = 4  # blocks that a unit loses before worths are compared again
_FRESH = 4  # fewer new blocks than that join the unit that they follow
_GROWING = 1024  # touches since its last growth during which more new blocks are part of the same use
_LOOKED_AT = 2  # units, and ghosts, with each eviction
_LEARN_MIN, _LEARN_MAX = 64, 4096  # touches between two times that worths are computed anew
_MEMORY_MIN = 1 << 16  # touches after which what was seen counts for half, at the least
_FALLEN = 0.95  # a worth below that part of the one noted is noted anew
_UNKNOWN = 1 << 60  # blocks
_SLACK = 64  # stale heap entries that are not worth a clean-up


class PrefixAwarePolicy(Generic[B]):
    """See `Policy`."""

    def __init__(self) -> None:
        self._now = 0  # blocks touched
        self._names: Names[B] = Names()
        self._count = 0
        self._capacity = _UNKNOWN  # blocks: as many as there were when a victim was asked for last
        self._duel: Duel[B] = Duel()
        self._ours = self._known = 0  # blocks of the current touch, see `Duel.score`
        self._units: list[Unit[B]] = []  # with blocks
        self._hand = 0  # index of the unit that is looked at next
        self._heap: list[tuple[float, int, Unit[B]]] = []  # worth, number of the entry
        self._entries = 0
        self._ghosts: Ghosts[B] = Ghosts()
        self._density = Density()
        self._learnt_at = self._learn_after = 0
        self._pick: Unit[B] | None = None  # loses its last block next
        self._left = 0  # blocks that it loses before another one is looked for

    def __len__(self) -> int:
        return self._count

    # --- what happens -----------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[B]) -> None:
        """See `Policy`."""
        piece = list(blocks)
        self._now += len(piece)
        self._pick = None
        i = 0
        while i < len(piece):
            if piece[i].touched:
                i += self._use(piece, i)
            else:
                parent = self._names.parent(piece[i])
                run = self._enter(piece, i, 0 if parent is None else parent.touched)
                self._store(run, parent)
                i += len(run)
        if self._now - self._learnt_at >= self._learn_after:
            self._learn()
        self._score(self._duel.use(piece, self._capacity))

    def discard(self, block: B) -> None:
        """See `Policy`."""
        unit = self._unit(block)
        if unit.open:
            self._close(unit)
            unit = self._unit(block)
        if block is unit.blocks[-1]:
            unit.blocks.pop()
            unit.note_gone(block)
            self._left -= 1
        else:  # not evicted, but removed
            self._cut(unit, block.touched, unit.used_at)
            unit.blocks.pop()
        self._names.remove(block)
        block.touched, block.policy = 0, None
        self._count -= 1
        if not unit.blocks:
            self._bury(unit)
        elif not unit.entry:
            self._offer(unit)
        self._look()

    def released(self, block: B) -> None:
        """See `Policy`."""
        if block.touched:
            unit = self._unit(block)
            if not unit.entry and unit.blocks[-1] is block:
                self._offer(unit)

    def victim(self) -> B | None:
        """See `Policy`."""
        pick = self._pick
        if pick is not None and self._left > 0 and pick.blocks and free(pick.blocks[-1]):
            return pick.blocks[-1]
        self._capacity = self._count
        heap = self._heap
        while heap:
            worth, entry, unit = heap[0]
            if unit.entry != entry:
                heappop(heap)
            elif unit.open:
                self._close(unit)
            elif not free(unit.blocks[-1]):
                unit.entry = 0
                heappop(heap)
            else:
                unit.value = self._worth(unit)
                if unit.value <= worth:
                    self._pick = unit
                    self._left = _AT_ONCE if unit.marks else 1  # the very last block is worth least by far
                    return unit.blocks[-1]
                self._entries += 1
                unit.entry = self._entries
                heapreplace(heap, (unit.value, unit.entry, unit))
        return None

    def inner_victim(self) -> B | None:
        """See `Policy`."""
        blocks = (block for unit in self._units for block in reversed(unit.blocks))
        return next((block for block in blocks if not block.pins), None)

    def check_integrity(self) -> None:
        """See `Policy`."""
        entries = {entry for _, entry, unit in self._heap if entry == unit.entry}
        for slot, unit in enumerate(self._units):
            if unit.slot != slot or not unit.blocks:
                raise IntegrityError(what="eviction order", detail=f"unit {slot} believes to be {unit.slot}")
            for position, block in enumerate(unit.blocks, unit.start):
                if block.policy is not unit or block.touched != position + 1:
                    raise IntegrityError(what="eviction order", detail=f"{block!r} is not at {position}")
            if (unit.entry or free(unit.blocks[-1])) and unit.entry not in entries:
                raise IntegrityError(what="eviction order", detail=f"{unit.blocks[-1]!r} is not in the heap")
        known = sum(len(unit.blocks) for unit in self._units)
        if not known == self._count == len(self._names):
            detail = f"{self._count} blocks, {known} in units, {len(self._names)} by name"
            raise IntegrityError(what="eviction order", detail=detail)

    # --- uses -------------------------------------------------------------------------------------------

    def _unit(self, block: B) -> Unit[B]:
        unit = block.policy
        if not isinstance(unit, Unit):
            raise IntegrityError(what="eviction order", detail=f"{block!r} is in no unit")
        return unit

    def _use(self, piece: Sequence[B], i: int) -> int:
        """Known blocks from `piece[i]` on, as far as they are of one unit, were used; how many."""
        unit, first = self._unit(piece[i]), piece[i].touched - 1
        if unit.open and first != unit.read:
            self._close(unit)
            unit = self._unit(piece[i])
        if not unit.open:
            if first > unit.start:
                unit = self._cut(unit, first, unit.used_at)
            self._begin_use(unit)
        mine, count = unit.blocks, 0
        offset = first - unit.start - i
        for j in range(i, min(len(piece), len(mine) - offset)):
            if piece[j] is not mine[j + offset]:
                break
            count += 1
        unit.read += count
        self._ours += count
        self._known += count
        self._end_if_whole(unit)
        return count

    def _begin_use(self, unit: Unit[B]) -> None:
        age = self._now - unit.used_at
        self._density.saw_use(unit, age)
        unit.uses += 1
        unit.gap, unit.used_at = age, self._now
        unit.open, unit.read, unit.grown = True, unit.start, 0
        if unit.kind >= Kind.REST:
            unit.kind = Kind.WHOLE

    def _end_if_whole(self, unit: Unit[B]) -> None:
        if unit.read == unit.full:
            self._density.saw_reach(unit, 0)
            self._settle(unit)

    def _close(self, unit: Unit[B]) -> None:
        """The use in progress came no further than it is."""
        lost = unit.full - unit.read
        self._density.saw_reach(unit, lost)
        if lost > 1 or unit.kind is Kind.STEM:  # else the last block was replaced: it had been filled in part
            unit.kind = Kind.STEM
        unit.open = False
        self._cut(unit, unit.read, unit.used_at - unit.gap)

    def _settle(self, unit: Unit[B]) -> None:
        """A unit has the size that it will have for some time."""
        unit.open = False
        self._density.place(unit)
        self._offer(unit)

    def _cut(self, unit: Unit[B], at: int, used_at: int) -> Unit[B]:
        """The blocks from position `at` on become a unit of their own, last used at `used_at`."""
        keep = at - unit.start
        rest: Unit[B] = Unit(Kind.REST, at, used_at, 0, unit.name)
        rest.blocks, rest.marks = unit.blocks[keep:], unit.marks
        del unit.blocks[keep:]
        unit.marks = array("I")
        if rest.blocks:
            rest.name = (unit.name[0], rest.blocks[0].key)
            rest.credited = age_bin(self._now - used_at)
            for block in rest.blocks:
                block.policy = rest
            self._list(rest)
            self._settle(rest)
        self._settle(unit)
        return rest

    # --- new blocks -------------------------------------------------------------------------------------

    def _enter(self, piece: Sequence[B], i: int, position: int) -> list[B]:
        """Make a chain of blocks known that starts at `piece[i]` and, in its chain, at `position`."""
        run: list[B] = []
        before: B | None = None
        for block in piece[i:]:
            if block.touched or (before is not None and not follows(block, before)):
                break
            position += 1
            block.touched = position
            self._names.add(block)
            run.append(block)
            before = block
        self._count += len(run)
        return run

    def _store(self, run: Sequence[B], parent: B | None) -> None:
        """A chain of new blocks below `parent` was stored."""
        above = None if parent is None else self._unit(parent)
        back = self._gone_before(run[0], above)
        if back is not None:
            count = self._regrow(back, run)
            if count == len(run):
                return
            run, above = run[count:], back
        if above is not None and above.open and above.read == run[0].touched - 1:
            self._close(above)  # a fork
        if above is None or not self._joins(run, above):
            above = self._new_unit(run[0], above)
        for block in run:
            block.policy = above
        above.blocks.extend(run)
        above.grown += len(run)
        above.stored_at = self._now
        self._settle(above)

    def _gone_before(self, block: B, above: Unit[B] | None) -> Unit[B] | None:
        """The unit that a new block had been a part of."""
        position = block.touched - 1
        if above is not None and above.end == position and above.marks and above.marks[-1] == mark(block.key):
            return above
        unit = self._ghosts.take((block.namespace, block.key))
        if unit is not None:
            unit.start = position
            self._list(unit)
        return unit

    def _regrow(self, unit: Unit[B], run: Sequence[B]) -> int:
        """Evicted blocks of a unit are stored again: they would have been used. How many of `run` are."""
        if not unit.open:
            self._begin_use(unit)
        count = 0
        for block in run:
            if not unit.marks or unit.marks[-1] != mark(block.key):
                break
            unit.marks.pop()
            unit.blocks.append(block)
            block.policy = unit
            count += 1
        unit.read = unit.end
        self._known += count
        if not unit.marks:
            self._end_if_whole(unit)
        elif count < len(run):
            self._close(unit)
        elif not unit.entry:
            self._offer(unit)
        return count

    def _joins(self, run: Sequence[B], above: Unit[B]) -> bool:
        """Whether new blocks become part of the unit that they follow."""
        if above.end != run[0].touched - 1 or above.marks or self._now - above.stored_at > _GROWING:
            return False
        return above.uses == 1 or (above.kind is Kind.WHOLE and above.grown + len(run) < _FRESH)

    def _new_unit(self, first: B, above: Unit[B] | None) -> Unit[B]:
        turns = 0 if above is None else above.uses + above.turns_above
        kind = Kind.WHOLE if above is None else Kind.BRANCH
        name = (first.namespace, first.key)
        unit: Unit[B] = Unit(kind, first.touched - 1, self._now, turns if turns < TURNS_MAX else 0, name)
        self._list(unit)
        return unit

    # --- the books --------------------------------------------------------------------------------------

    def _list(self, unit: Unit[B]) -> None:
        unit.slot = len(self._units)
        self._units.append(unit)

    def _bury(self, unit: Unit[B]) -> None:
        """A unit has lost its last block."""
        last = self._units.pop()
        if last is not unit:
            self._units[unit.slot] = last
            last.slot = unit.slot
        unit.slot, unit.entry = -1, 0
        if unit.kind is not Kind.REST and unit.marks:
            self._ghosts.add(unit)
        for ghost in self._ghosts.forget(self._count):
            self._density.saw_unused(ghost, self._now - ghost.used_at)

    def _offer(self, unit: Unit[B]) -> None:
        """Note what a unit is worth, if it may lose its last block."""
        if not free(unit.blocks[-1]):
            unit.entry = 0
            return
        self._entries += 1
        unit.entry = self._entries
        unit.value = self._worth(unit)
        heappush(self._heap, (unit.value, unit.entry, unit))
        if len(self._heap) > 2 * len(self._units) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].entry]
            heapify(self._heap)

    def _look(self) -> None:
        """See what has become of a few units since they were looked at last."""
        now, density = self._now, self._density
        for _ in range(min(_LOOKED_AT, len(self._units))):
            self._hand = self._hand + 1 if self._hand + 1 < len(self._units) else 0
            unit = self._units[self._hand]
            age = now - unit.used_at
            density.saw_unused(unit, age)
            if unit.open and age > _GROWING:
                self._close(unit)
            elif unit.entry and self._worth(unit) < _FALLEN * unit.value:
                self._offer(unit)
        for ghost in self._ghosts.look(_LOOKED_AT):
            density.saw_unused(ghost, now - ghost.used_at)

    def _worth(self, unit: Unit[B]) -> float:
        if self._duel.learnt:
            return self._density.worth(unit, self._now - unit.used_at)
        return float(unit.used_at)

    def _score(self, shadows: int) -> None:
        changed = self._capacity < _UNKNOWN and self._duel.score(
            self._ours, shadows, self._known, self._now, self._capacity
        )
        self._ours = self._known = 0
        if changed:
            self._heap.clear()
            for unit in self._units:
                self._offer(unit)

    def _learn(self) -> None:
        passed = self._now - self._learnt_at
        self._density.learn(0.5 ** (passed / max(_MEMORY_MIN, 4 * self._count)))
        self._learnt_at = self._now
        self._learn_after = min(_LEARN_MAX, max(_LEARN_MIN, self._now // 4))
