"""The blocks of one namespace by key, and who is whose child in their prefix chains. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncaked.block import Block, BlockState
from mooncaked.errors import IntegrityError
from mooncaked.keys import show_key


@dataclass(slots=True)
class Namespace:
    """What the block table knows of one namespace. The table changes the states of blocks."""

    name: str
    visible: dict[bytes, Block] = field(default_factory=dict)  # COMPLETE
    pending: dict[bytes, Block] = field(default_factory=dict)  # ALLOCATED or FILLING
    visible_bytes: int = 0  # of values
    _children: dict[bytes, int] = field(default_factory=dict)  # parent's key -> visible and pending blocks

    def __bool__(self) -> bool:
        return bool(self.visible or self.pending)

    def enter(self, block: Block) -> None:
        """A block takes its name, as one that is COMPLETE, or pending, and counts as a child from now on.
        Raises `IntegrityError` when it is taken."""
        if block.key in self.visible or block.key in self.pending:
            self._broken(f"{show_key(block.key)} is allocated twice")
        block.children = self._children.get(block.key, 0)
        if block.state is BlockState.COMPLETE:
            self.show(block)
        else:
            self.pending[block.key] = block
        if block.parent is not None:
            self.count_child(block.parent, 1)

    def show(self, block: Block) -> None:
        """A block is readable."""
        self.visible[block.key] = block
        self.visible_bytes += block.size

    def hide(self, block: Block) -> None:
        """A block is no longer readable."""
        del self.visible[block.key]
        self.visible_bytes -= block.size

    def count_child(self, parent: bytes, change: int) -> Block | None:
        """A block with this parent has come or gone; the parent, if it is COMPLETE and has no child now."""
        count = self._children.get(parent, 0) + change
        if count:
            self._children[parent] = count
        else:
            del self._children[parent]
        block = self.visible.get(parent)
        if block is None:
            block = self.pending.get(parent)
        if block is None:
            return None
        block.children = count
        return block if not count and block.state is BlockState.COMPLETE else None

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless everything is where it belongs. O(blocks)."""
        children: dict[bytes, int] = {}
        for blocks, states in (
            (self.visible, (BlockState.COMPLETE,)),
            (self.pending, (BlockState.ALLOCATED, BlockState.FILLING)),
        ):
            for key, block in blocks.items():
                if (block.namespace, block.key) != (self.name, key) or block.state not in states:
                    self._broken(f"{block!r} is filed under {show_key(key)}")
                if block.children != self._children.get(key, 0):
                    self._broken(
                        f"{block!r} counts {block.children} of {self._children.get(key, 0)} children"
                    )
                if block.parent is not None:
                    children[block.parent] = children.get(block.parent, 0) + 1
        if self.visible_bytes != sum(block.size for block in self.visible.values()):
            self._broken(f"it does not have {self.visible_bytes} readable bytes")
        if children != self._children or self.visible.keys() & self.pending.keys():
            self._broken("the index of children is off, or a key is there twice")
        if not self:
            self._broken("it is empty but kept")

    def _broken(self, detail: str) -> None:
        raise IntegrityError(what=f"namespace {self.name}", detail=detail)
