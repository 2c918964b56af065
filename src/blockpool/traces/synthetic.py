"""The built-in workload: a busy hour of chats, agents and one-shot prompts, small enough to replay in a second.

It is made up, not measured. What it has in common with real traffic is the kinds of sharing: system prompts shared by
many chats, histories that grow turn by turn, agents whose long contexts are sent again at each step, and prompts that
share nothing. The same seed gives the same requests on every machine.
"""

import random
from collections.abc import Iterator
from itertools import count

import numpy as np

from .trace import Trace, TraceRequest, in_arrival_order

UNIT_TOKENS = 16
SCOPE = "built-in"
SEED = 2026
HOUR_S = 3600

SYSTEM_PROMPT_TOKENS = (320, 750, 1200, 2100)
TOOL_PROMPT_TOKENS = (5200, 6900)
NUM_CHATS, NUM_AGENTS, NUM_ONE_SHOTS = 70, 4, 120


class _Context:
    """A text that only grows, known by the ids of its full units."""

    def __init__(self, fresh_ids: Iterator[int], start: "_Context | None" = None) -> None:
        self._fresh_ids = fresh_ids
        self.ids: list[int] = [] if start is None else list(start.ids)
        self.num_tokens: int = 0 if start is None else start.num_tokens

    def grow(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        while len(self.ids) < self.num_tokens // UNIT_TOKENS:
            self.ids.append(next(self._fresh_ids))


class _Dice:
    """Draws made of `random()` alone, the one method whose numbers Python promises never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def between(self, low: int, high: int) -> int:
        """low <= number < high, all equally likely."""
        return low + int((high - low) * self._random())

    def mostly_low(self, low: int, high: int) -> int:
        """low <= number < high, small ones more often: lengths of texts."""
        draw = self._random()
        return low + int((high - low) * draw * draw)


class _Workload:
    def __init__(self, seed: int) -> None:
        self.dice = _Dice(seed)
        self.fresh_ids = count()
        self.requests: list[TraceRequest] = []

    def shared_prompts(self, lengths: tuple[int, ...]) -> list[_Context]:
        prompts = []
        for num_tokens in lengths:
            prompt = _Context(self.fresh_ids)
            prompt.grow(num_tokens)
            prompts.append(prompt)
        return prompts

    def send(self, arrival_s: float, context: _Context, num_output_tokens: int, kind: str) -> None:
        self.requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=context.num_tokens,
                num_output_tokens=num_output_tokens,
                source=f"built-in:{kind}",
                unit=UNIT_TOKENS,
                scope=SCOPE,
                hash_ids=np.array(context.ids, dtype=np.int64),
            )
        )

    def chat(self, system_prompt: _Context) -> None:
        """A person: reads, thinks, and writes short messages on top of everything said before."""
        dice, context = self.dice, _Context(self.fresh_ids, system_prompt)
        now_s = dice.between(0, HOUR_S)
        for _ in range(dice.mostly_low(1, 12)):
            context.grow(dice.mostly_low(12, 600))
            answer_tokens = dice.mostly_low(30, 800)
            self.send(now_s, context, answer_tokens, "chat")
            context.grow(answer_tokens)
            now_s += dice.between(15, 180)

    def agent(self, tool_prompt: _Context) -> None:
        """A program: sends its whole context again seconds later, with one more tool result."""
        dice, context = self.dice, _Context(self.fresh_ids, tool_prompt)
        now_s = dice.between(0, HOUR_S)
        context.grow(dice.mostly_low(50, 900))
        for _ in range(dice.between(8, 25)):
            call_tokens = dice.mostly_low(40, 500)
            self.send(now_s, context, call_tokens, "agent")
            context.grow(call_tokens + dice.mostly_low(80, 2400))
            now_s += dice.between(3, 30)

    def one_shot(self) -> None:
        """A document to summarise or to classify: shares nothing with anything."""
        context = _Context(self.fresh_ids)
        context.grow(self.dice.mostly_low(150, 6000))
        self.send(self.dice.between(0, HOUR_S), context, self.dice.mostly_low(5, 400), "one-shot")


def synthetic_trace(seed: int = SEED) -> Trace:
    """The built-in workload as an ordinary trace: ids of 16 tokens, times in seconds within about an hour."""
    workload = _Workload(seed)
    system_prompts = workload.shared_prompts(SYSTEM_PROMPT_TOKENS)
    tool_prompts = workload.shared_prompts(TOOL_PROMPT_TOKENS)
    for _ in range(NUM_CHATS):
        workload.chat(system_prompts[workload.dice.mostly_low(0, len(system_prompts))])
    for number in range(NUM_AGENTS):
        workload.agent(tool_prompts[number % len(tool_prompts)])
    for _ in range(NUM_ONE_SHOTS):
        workload.one_shot()
    return Trace(requests=in_arrival_order(workload.requests), names=("built-in workload",))
