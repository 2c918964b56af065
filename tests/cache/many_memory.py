"""What the memory behind the block ids would hold: each slot knows the prefix that it was written for.

Every read of every step is checked, so a block that was handed out, overwritten, moved or hit at the wrong time shows
as a slot of another prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.cache.many_model import ModelGroup

STATE = -1  # the slot of a state


@dataclass
class Work:
    """One request's part of a step: it computes tokens first .. last-1 with these tables, the first of them loaded.

    `prints[n]`: what names the first n tokens; `true_until`: tokens behind are drafts that will be rejected.
    """

    name: str
    epoch: int
    loaded: int
    first: int
    last: int
    true_until: int
    prompt: int
    prints: Sequence[int]
    tables: tuple[list[int], ...]
    samples: int = 0
    admitted_with: int = -1  # tokens of its hit, for an admission


class Memory:
    def __init__(self, groups: list[ModelGroup], num_blocks: Sequence[int]) -> None:
        self.groups = groups
        self.content: list[list[dict[int, int]]] = [[{} for _ in range(n)] for n in num_blocks]

    def copy(self, number: int, src: int, dst: int) -> None:
        blocks = self.content[self.groups[number].pool]
        blocks[dst] = dict(blocks[src])

    def clear(self, number: int, block: int) -> None:
        self.content[self.groups[number].pool][block] = {}

    def forward(self, work: Work) -> None:
        for g in self.groups:
            if g.rule is not None:
                (self.state if g.is_state else self.attend)(g, work)

    def state(self, g: ModelGroup, work: Work) -> None:
        blocks = self.content[g.pool]
        table = work.tables[g.number]
        if work.loaded < work.first:
            block = table[(work.first - 1) // g.size]
            assert block, f"{work.name}: no block for the loaded state of group {g.number}"
            blocks[block] = {STATE: work.prints[work.first]}
        if work.first == work.last:
            return
        if work.first > 0:
            block = table[(work.first - 1) // g.size]
            assert blocks[block].get(STATE) == work.prints[work.first], f"{work.name}: state of group {g.number}"
        at = (work.last - 1) // g.size
        assert table[at], f"{work.name}: no block for the running state of group {g.number}"
        blocks[table[at]] = {STATE: work.prints[work.last]}
        for block in table[at + 1 :]:
            blocks[block] = {}

    def attend(self, g: ModelGroup, work: Work) -> None:
        blocks = self.content[g.pool]
        table = work.tables[g.number]
        assert g.rule is not None
        for token in range(work.loaded, work.first):
            if table[token // g.size]:
                blocks[table[token // g.size]][token % g.size] = work.prints[token + 1]
        unread = self.unread(g, work)
        for token in range(work.first if work.first < work.last else 0):
            if token not in unread:
                block = table[token // g.size]
                held = blocks[block].get(token % g.size)
                assert block, f"{work.name}: token {token} of group {g.number} has no block"
                assert held == work.prints[token + 1], f"{work.name}: token {token} of group {g.number}"
        for token in range(work.first, work.last):
            block = table[token // g.size]
            assert block, f"{work.name}: token {token} of group {g.number} has no slot"
            blocks[block][token % g.size] = work.prints[token + 1] if token < work.true_until else -token - 1

    def unread(self, g: ModelGroup, work: Work) -> range:
        """The tokens before the first computed one that it does not read."""
        n = work.first
        spec = g.rule.spec  # type: ignore[union-attr]
        if g.kind == "window":
            return range(n - spec.sliding_window + 1)  # type: ignore[attr-defined]
        if g.kind == "chunked":
            return range(n - n % spec.attention_chunk_size)  # type: ignore[attr-defined]
        if g.kind == "reference":
            return range(work.prompt, n - spec.sliding_window)  # type: ignore[attr-defined]
        return range(0)
