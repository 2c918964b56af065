"""A few prompts through an engine over the reference model, told as it happens: the life of the blocks.

Tokens are words. The weights are random, so what the model says means nothing; but it says the same whenever it has
read the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from string import ascii_lowercase
from typing import NamedTuple

from blockpool.cache import KVCacheConfig, KVCacheManager
from blockpool.engine.output import NewRequestData, SchedulerOutput
from blockpool.engine.reference_model import ReferenceModel
from blockpool.engine.request import EngineRequest
from blockpool.engine.scheduler import Scheduler
from blockpool.engine.states import FinishReason
from blockpool.engine.worker import Worker
from blockpool.hashing import BlockHasher
from blockpool.managers import FullAttentionSpec, KVCacheGroupSpec

BLOCK_SIZE = 8
HASH_BLOCK_SIZE = 2
ANSWER = 5
MAX_NUM_SEQS = 3
MAX_NUM_BATCHED_TOKENS = 24

#: They show everything: a shared start, an equal prompt, and more than the pool can hold at a time.
PROMPTS = (
    "you are a kind librarian who answers briefly where are maps",
    "you are a kind librarian who answers briefly who wrote the red book ?",
    "tell a long story of a clever fox who wanted to count all stars of the sky before the winter came",
    "you are a kind librarian who answers briefly where are maps",
    "what is the shortest way from here to the sea for a lazy cat ?",
    "tell a long story of a clever fox who wanted to count all stars of the sea ?",
)
NUM_BLOCKS = 8

#: What an answer may consist of beside the words of the prompts.
WORDS = (
    "river stone quiet green lamp seven under bread window sings old north paper bell slow winter glass door falls"
    " bright copper salt honest wheel amber cloud"
)


class Line(NamedTuple):
    """Something that happened in a step; `who`: the names of the requests that it happened to, "" for none."""

    step: int
    who: str
    what: str
    text: str


def block_count(num_tokens: int) -> int:
    """Blocks that so many tokens fill."""
    return -(-num_tokens // BLOCK_SIZE)


def small_num_blocks(prompts: Sequence[str]) -> int:
    """A pool, null block included, for the longest prompt with its answer and half as much again: room is short."""
    longest = max(block_count(len(prompt.split()) + ANSWER) for prompt in prompts)
    return 1 + longest + max(2, longest // 2)


def blocks_needed(prompt: str) -> int:
    """Blocks that a prompt needs to be answered in full: the last word of the answer is never computed."""
    return block_count(len(prompt.split()) + ANSWER - 1)


def names() -> Iterator[str]:
    """a, b, …, z, a2, b2, …"""
    for number in count(1):
        for letter in ascii_lowercase:
            yield letter if number == 1 else f"{letter}{number}"


class Demo:
    """`answers`: what each request has said, "" for those that could not run to their end. `num_computed`: tokens
    computed in all.

    One step at a time; all prompts arrive at the start.
    """

    def __init__(self, prompts: Sequence[str], num_blocks: int, caching: bool = True) -> None:
        group = KVCacheGroupSpec(("layers.0", "layers.1"), FullAttentionSpec(BLOCK_SIZE))
        config = KVCacheConfig(num_blocks, (group,), hash_block_size=HASH_BLOCK_SIZE)
        self.vocabulary = sorted({word for prompt in prompts for word in prompt.split()} | set(WORDS.split()))
        number_of = {word: number for number, word in enumerate(self.vocabulary)}
        model = ReferenceModel(config, len(self.vocabulary))
        self.manager = KVCacheManager(config, enable_caching=caching)
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
        )
        self.worker = Worker(config, model.store(), model)
        hasher = BlockHasher(hash_block_size=HASH_BLOCK_SIZE, seed="demo")
        self.requests = {
            name: EngineRequest(name, [number_of[word] for word in prompt.split()], max_tokens=ANSWER, hasher=hasher)
            for name, prompt in zip(names(), prompts, strict=False)
        }
        self.answers = dict.fromkeys(self.requests, "")
        self.num_computed = 0
        self.num_copies = 0
        self._holds: dict[int, str] = {}  # block -> the words that it was filled with

    def run(self) -> Iterator[Line]:
        """Run to the end. Steps in which requests only grow by a token each are one line together."""
        for request in self.requests.values():
            self.scheduler.add_request(request)
        quiet: list[tuple[int, str]] = []
        while self.scheduler.has_work:
            tables = {name: self.manager.get_block_ids(name)[0] for name in self.requests}
            cached = {block for block in self._holds if self.manager.pool.get_block_hashes(block)}
            output = self.scheduler.schedule()
            lines = list(self._told(output, tables, cached))
            if output.step_id >= 0:
                self.num_computed += sum(output.num_scheduled_tokens.values())
                self.num_copies += len(output.copies)
                results = self.worker.execute(output)
                self._remember(output)
                self.scheduler.update(output.step_id, results)
                decoding = [data.request_id for data in output.running if self._decodes(output, data.request_id)]
                if decoding:
                    quiet.append((output.step_id, " ".join(decoding)))
            lines += self._ended(output.step_id)
            assert lines or output.step_id >= 0, "nothing runs and nothing ends"
            if lines:
                yield from grown(quiet)
                quiet = []
                yield from lines
        yield from grown(quiet)

    # -- one step ------------------------------------------------------------------------------------

    def _told(self, output: SchedulerOutput, tables: dict[str, list[int]], cached: set[int]) -> Iterator[Line]:
        step = output.step_id
        for name in output.preempted_ids:
            blocks = [block for block in tables[name] if block]
            yield Line(
                step, name, "preempted", f"gives {blocks_text(blocks)} back, waits, and will look for its prefix"
            )
        taken: list[int] = []
        lines: list[Line] = []
        for data in output.running:
            taken += data.new_block_ids[0]
            name, num_tokens = data.request_id, output.num_scheduled_tokens[data.request_id]
            if not self._decodes(output, name):
                where = blocks_text(data.new_block_ids[0])
                text = f"{num_tokens} more of {self.requests[name].num_tokens} tokens, in {where}"
                lines.append(Line(step, name, "prefill", text))
        for new in output.new_requests:
            fresh, told = self._admitted(output, new)
            taken += fresh
            lines += told
        for block in taken:
            if block in cached:
                yield Line(step, "", "evicted", f"block {block} is handed out again and forgets {self._quote(block)}")
        yield from lines

    def _decodes(self, output: SchedulerOutput, name: str) -> bool:
        return output.num_scheduled_tokens[name] == 1

    def _admitted(self, output: SchedulerOutput, new: NewRequestData) -> tuple[list[int], list[Line]]:
        """The new blocks of a request that starts, and how it starts."""
        step, name, table = output.step_id, new.request_id, new.block_ids[0]
        hit = new.num_computed_tokens
        shared = table[: hit // BLOCK_SIZE]
        fresh = table[len(shared) :]
        lines: list[Line] = []
        again = " again" if self.requests[name].num_preemptions else ""
        num_tokens = output.num_scheduled_tokens[name]
        if hit % BLOCK_SIZE:
            source = {copy.dst_block_id: copy.src_block_id for copy in output.copies}[fresh[0]]
            text = f"{hit} tokens{again}: {blocks_text(shared)} shared, {hit % BLOCK_SIZE} tokens in a copy of block"
            lines.append(Line(step, name, "partial hit", f"{text} {source}"))
            lines.append(Line(step, name, "copy", f"block {source} to block {fresh[0]}, before the step computes"))
        elif hit:
            lines.append(Line(step, name, "hit", f"{hit} tokens{again}: {blocks_text(shared)} shared"))
        text = f"{num_tokens} of {len(new.token_ids)} tokens, in {blocks_text(fresh)}"
        lines.append(Line(step, name, "prefill", text))
        return fresh, lines

    def _remember(self, output: SchedulerOutput) -> None:
        for name in output.num_scheduled_tokens:
            tokens = self.requests[name].tokens
            for at, block in enumerate(self.manager.get_block_ids(name)[0]):
                words = [self.vocabulary[token] for token in tokens[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]]
                self._holds[block] = " ".join(words)

    def _quote(self, block: int) -> str:
        return f'"{self._holds[block]}"'

    def _ended(self, step: int) -> Iterator[Line]:
        for ended in self.scheduler.take_finished():
            request = self.requests[ended.request_id]
            if ended.reason is FinishReason.ERROR:
                yield Line(step, ended.request_id, "error", self._why_not(request, ended.message))
                continue
            self.answers[ended.request_id] = " ".join(self.vocabulary[token] for token in request.output_token_ids)
            yield Line(step, ended.request_id, "finished", f'says "{self.answers[ended.request_id]}"')

    def _why_not(self, request: EngineRequest, message: str) -> str:
        """Why a request ended with an error, in words."""
        needed, most = block_count(request.num_tokens), self.num_blocks - 1
        if needed <= most:
            return message
        what = "cannot go on" if request.num_output_tokens else "cannot run"
        return f"{what}: {request.num_tokens} tokens need {needed} blocks, the pool has {most}"

    @property
    def unanswered(self) -> list[str]:
        """Requests that could not run to their end."""
        return [name for name, answer in self.answers.items() if not answer]


def blocks_text(blocks: Sequence[int]) -> str:
    if not blocks:
        return "no block"
    return ("block " if len(blocks) == 1 else "blocks ") + " ".join(map(str, blocks))


def grown(quiet: list[tuple[int, str]]) -> Iterator[Line]:
    """One line for steps that were told of nothing but growth."""
    if quiet:
        last, who = quiet[-1]
        steps = f"one token each in steps {quiet[0][0]} to {last}" if len(quiet) > 1 else "one token each"
        yield Line(quiet[0][0], who, "decode", steps)
