"""A small decoder in numpy with fixed random weights, paged through block tables: what an engine's tokens must equal.

Every number is computed per token, by operations whose shapes depend on that token's place alone. So the same prefix
gives the same bits, whatever was computed together with it, and in whatever blocks it lies.
"""

from __future__ import annotations

import numpy as np

from blockpool.cache import KVCacheConfig
from blockpool.engine.model import RequestStep
from blockpool.engine.paged_store import PagedStore
from blockpool.engine.reads import tokens_read
from blockpool.engine.slots import Ints, slots_of
from blockpool.engine.store import Array, Store
from blockpool.engine.worker import WorkerError
from blockpool.managers import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    ReferenceWindowSpec,
    SlidingWindowSpec,
)

ATTENTION = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, ReferenceWindowSpec)


class Layer:
    """The weights of one layer of a group; `number`: which of the group's layers it is."""

    def __init__(self, random: np.random.Generator, group_id: int, number: int, heads: int, head_dim: int) -> None:
        width = heads * head_dim
        self.group_id = group_id
        self.number = number
        weights = random.normal(0.0, 1.5 / np.sqrt(width), (6, width, width))
        self.query, self.key, self.value, self.out, self.up, self.down = weights
        self.gate: Array = random.normal(0.0, 1.0, (width, heads))


class ReferenceModel:
    """Greedy and deterministic, in float64; the layers are those that the config's groups name, one of each group by
    turns. Full, sliding-window, chunked and reference-window attention with rotary positions; state groups are a
    gated linear recurrence. Raises TypeError for other kinds.

    `store()` makes memory for it.
    """

    def __init__(
        self, config: KVCacheConfig, vocab_size: int = 64, heads: int = 2, head_dim: int = 8, seed: int = 1
    ) -> None:
        for group in config.kv_cache_groups:
            if not isinstance(group.kv_cache_spec, (*ATTENTION, MambaSpec)):
                raise TypeError(f"the reference model has no layers of {type(group.kv_cache_spec).__name__}")
        random = np.random.default_rng(seed)
        self.config = config
        self.vocab_size = vocab_size
        self.heads = heads
        self.head_dim = head_dim
        width = heads * head_dim
        self.embedding: Array = random.normal(0.0, 1.0, (vocab_size, width))
        self.unembedding: Array = random.normal(0.0, 1.0, (width, vocab_size))
        self.frequencies: Array = np.power(0.5, np.arange(head_dim // 2))
        counts = [len(group.layer_names) for group in config.kv_cache_groups]
        self.layers = [
            Layer(random, group_id, number, heads, head_dim)
            for number in range(max(counts))
            for group_id, count in enumerate(counts)
            if number < count
        ]

    def store(self) -> PagedStore:
        return PagedStore(self.config, (self.heads, self.head_dim), (self.heads, self.head_dim, self.head_dim))

    def forward(self, steps: list[RequestStep], store: Store) -> list[list[int]]:
        """Raises WorkerError, before anything is computed, for a token that is not in the vocabulary."""
        for step in steps:
            self._must_be_tokens(step)
        hidden = [[self.embedding[token] for token in step.token_ids[step.first : step.last]] for step in steps]
        for layer in self.layers:
            spec = self.config.kv_cache_groups[layer.group_id].kv_cache_spec
            if isinstance(spec, MambaSpec):
                starts = [self._start_state(layer, step, store) for step in steps]
                for step, vectors, state in zip(steps, hidden, starts, strict=True):
                    self._recur(layer, step, vectors, state, store)
            else:
                for step, vectors in zip(steps, hidden, strict=True):
                    self._write(layer, step, vectors, store)
                for step, vectors in zip(steps, hidden, strict=True):
                    self._attend(layer, step, vectors, store)
        return [self._sample(step, vectors) for step, vectors in zip(steps, hidden, strict=True)]

    def _must_be_tokens(self, step: RequestStep) -> None:
        for at in range(step.first, step.last):
            token = step.token_ids[at]
            if not 0 <= token < self.vocab_size:
                raise WorkerError(
                    f"request {step.request_id!r}: token {at} is {token}, where the model's tokens are 0 to"
                    f" {self.vocab_size - 1}"
                )

    def _sample(self, step: RequestStep, vectors: list[Array]) -> list[int]:
        if not step.wants_token:
            return []
        return [int(np.argmax(times(normed(x), self.unembedding))) for x in vectors[-1 - step.num_drafts :]]

    # -- attention -----------------------------------------------------------------------------------

    def _write(self, layer: Layer, step: RequestStep, vectors: list[Array], store: Store) -> None:
        keys = np.empty((len(vectors), self.heads, self.head_dim))
        values = np.empty_like(keys)
        for at, x in enumerate(vectors):
            x = normed(x)
            keys[at] = self._rotated(times(x, layer.key), step.first + at)
            values[at] = times(x, layer.value).reshape(self.heads, self.head_dim)
        tokens = np.arange(step.first, step.last)
        store.write(step.access(layer.group_id, tokens, self._slots(layer, step, tokens)), layer.number, keys, values)

    def _attend(self, layer: Layer, step: RequestStep, vectors: list[Array], store: Store) -> None:
        spec = self.config.kv_cache_groups[layer.group_id].kv_cache_spec
        for at, x in enumerate(vectors):
            token = step.first + at
            tokens = tokens_read(spec, token, token + 1, step.num_prompt_tokens)
            access = step.access(layer.group_id, tokens, self._slots(layer, step, tokens))
            keys, values = store.read(access, layer.number)
            query = self._rotated(times(normed(x), layer.query), token)
            scores = (keys * query).sum(axis=2) / np.sqrt(self.head_dim)
            weights = np.exp(scores - scores.max(axis=0))
            weights /= weights.sum(axis=0)
            vectors[at] = self._mixed(layer, x, (values * weights[:, :, None]).sum(axis=0).reshape(-1))

    def _slots(self, layer: Layer, step: RequestStep, tokens: Ints) -> Ints:
        block_size = self.config.kv_cache_groups[layer.group_id].block_size
        return slots_of(step.rows[layer.group_id], block_size, tokens)

    def _rotated(self, vector: Array, position: int) -> Array:
        """Pairs of numbers turned by angles that grow with the position, in every head."""
        pairs = vector.reshape(self.heads, self.head_dim // 2, 2)
        angles = position * self.frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        turned = np.empty_like(pairs)
        turned[:, :, 0] = pairs[:, :, 0] * cos - pairs[:, :, 1] * sin
        turned[:, :, 1] = pairs[:, :, 0] * sin + pairs[:, :, 1] * cos
        return turned.reshape(self.heads, self.head_dim)

    # -- recurrence ----------------------------------------------------------------------------------

    def _start_state(self, layer: Layer, step: RequestStep, store: Store) -> Array:
        states = step.states[layer.group_id]
        if states is None or step.first == 0:
            return np.zeros((self.heads, self.head_dim, self.head_dim))
        access = step.access(layer.group_id, np.array([step.first - 1]), np.array([states.start]))
        state: Array = store.read(access, layer.number)[0][0]
        return state

    def _recur(self, layer: Layer, step: RequestStep, vectors: list[Array], state: Array, store: Store) -> None:
        """state = gate * state + key x value, per head; what a token reads is its query times the state."""
        states = step.states[layer.group_id]
        assert states is not None
        left = dict(zip(states.after, states.writes, strict=True))
        for at, x in enumerate(vectors):
            token = step.first + at
            unit = normed(x)
            gate = 1.0 / (1.0 + np.exp(-times(unit, layer.gate) - 1.0))
            key = times(unit, layer.key).reshape(self.heads, self.head_dim)
            value = times(unit, layer.value).reshape(self.heads, self.head_dim)
            state = gate[:, None, None] * state + key[:, :, None] * value[:, None, :]
            query = times(unit, layer.query).reshape(self.heads, self.head_dim)
            read = (query[:, :, None] * state).sum(axis=1).reshape(-1)
            vectors[at] = self._mixed(layer, x, normed(read))
            if token + 1 in left:
                access = step.access(layer.group_id, np.array([token]), np.array([left[token + 1]]))
                store.write(access, layer.number, state[None])

    def _mixed(self, layer: Layer, x: Array, read: Array) -> Array:
        """The rest of a layer: what was read joins in, then a small network."""
        x = x + times(read, layer.out)
        return x + times(np.tanh(times(normed(x), layer.up)), layer.down)


def normed(x: Array) -> Array:
    size: float = np.sqrt((x * x).mean() + 1e-6)
    return x / size


def times(x: Array, weights: Array) -> Array:
    """Vector times matrix, summed in one order: a BLAS may choose another with every shape and address."""
    product: Array = (x[:, None] * weights).sum(axis=0)
    return product
