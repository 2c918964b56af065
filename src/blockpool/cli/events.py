"""`blockpool events`."""

import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .exits import fail, input_errors, unless_interrupted

if TYPE_CHECKING:
    from blockpool.pool import KVCacheEvent
    from blockpool.wire import BatchError, KVEventBatch
    from blockpool.wire.check import StreamCheck, StreamFault

FAULTS_FOUND = 1
PIPE_CLOSED = 141
SHOWN_HASH_DIGITS = 16
SHOWN_DIFFERENCES = 20
#: How long one look at the sockets may take; Ctrl-C is heard in between.
LOOK_S = 0.2


class UntilPipeCloses(TyperGroup):
    """A reader that has seen enough (`| head`) is no fault: 141, as a command that SIGPIPE ends."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes nowhere
            raise typer.Exit(PIPE_CLOSED) from None


events = typer.Typer(
    cls=UntilPipeCloses,
    help="Streams of KV-cache events: watch, record, play, check.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Endpoint = Annotated[str, typer.Argument(metavar="ENDPOINT", help="A publisher's PUB socket, tcp://host:5557.")]
Replay = Annotated[
    str | None, typer.Option("--replay", metavar="ENDPOINT", help="Its replay socket, for what was missed.")
]
Topic = Annotated[str, typer.Option("--topic", help="Topics that begin with this.")]
Count = Annotated[int | None, typer.Option("--count", metavar="N", help="Stop after N batches.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Convention = Annotated[
    str,
    typer.Option(
        "--convention",
        metavar="WORD",
        help="How copies of a key are announced: detect, first_last (the first and the last) or per_copy.",
    ),
]


@events.command(short_help="Watch a stream, a line per event.")
def tail(
    endpoint: Endpoint,
    replay: Replay = None,
    topic: Topic = "",
    count: Count = None,
    as_json: Json = False,
) -> None:
    """Watch a stream: a line per event, and one whenever what is known of it stops or begins to be true.

    Exit code: 0, 2 no such endpoint, 130 interrupted, 141 its reader has gone.

    Example: blockpool events tail tcp://localhost:5557 --replay tcp://localhost:5657
    """
    for seq, payload in _follow(endpoint, replay, topic, count):
        _print_batch(seq, payload, as_json)


@events.command(short_help="Write a stream to a file.")
def record(
    endpoint: Endpoint,
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSONL, a line per batch; it is replaced.")],
    replay: Replay = None,
    topic: Topic = "",
    count: Count = None,
) -> None:
    """Write a stream to a file, until Ctrl-C: what the publisher still has to replay, and then what comes.

    The file is for `events play`, `check` and `diff`, and for `blockpool replay`.

    Exit code: 0, 2 no such endpoint or file, 130 interrupted.

    Example: blockpool events record tcp://localhost:5557 events.jsonl --replay tcp://localhost:5657
    """
    from blockpool.wire.recording import record_line

    with input_errors(OSError), open(file, "wb") as out:
        number = num_none = 0
        for seq, payload in _follow(endpoint, replay, topic, count):
            if seq < 0:
                num_none += 1
                typer.echo(
                    "left out: a message that is no batch (not three frames, with a number of 8 bytes)", err=True
                )
                continue
            out.write(record_line(seq, payload))
            out.flush()
            number += 1
    left_out = f", {num_none:,} messages left out" if num_none else ""
    typer.echo(f"{number:,} batches in {file}{left_out}")


@events.command(short_help="Show a recorded stream, or send it again.")
def play(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A recording.")],
    endpoint: Annotated[
        str | None, typer.Argument(metavar="[ENDPOINT]", help="Where to publish it, tcp://*:5557; else it is shown.")
    ] = None,
    replay: Annotated[
        str | None, typer.Option("--replay", metavar="ENDPOINT", help="Where to answer who has missed something.")
    ] = None,
    topic: Annotated[str, typer.Option("--topic", help="The topic to publish under.")] = "",
    speed: Annotated[
        float, typer.Option("--speed", help="Times as fast as it was recorded; 0: at once.", min=0.0)
    ] = 1.0,
    linger: Annotated[float, typer.Option("--linger", help="Seconds to answer on when all is sent.", min=0.0)] = 0.0,
    as_json: Json = False,
) -> None:
    """Show a recorded stream, or publish it again: the same bytes under the same numbers.

    Exit code: 0, 2 no recording or no such endpoint, 130 interrupted.

    Example: blockpool events play events.jsonl 'tcp://*:5557' --replay 'tcp://*:5657' --speed 10
    """
    from blockpool.wire import WireError
    from blockpool.wire.player import LONGEST_PAUSE_S, Player
    from blockpool.wire.recording import read_recording

    _check_topic(topic)
    if not math.isfinite(speed):
        fail(f"--speed: {speed} is no speed")
    if not linger <= LONGEST_PAUSE_S:
        fail(f"--linger: expected at most {LONGEST_PAUSE_S:.0f} seconds, not {linger}")
    with unless_interrupted(), input_errors(WireError):
        if endpoint is None:
            for one in read_recording(file):
                _print_batch(one.seq, one.payload, as_json)
            return
        with Player(endpoint, replay, topic) as player:
            typer.echo(f"playing {file} at {player.endpoint}", err=True)
            sent = player.play(read_recording(file), speed)
            player.serve(linger)
        typer.echo(f"{sent:,} batches sent")


@events.command(short_help="Check a stream against every rule that events follow.")
def check(
    source: Annotated[str, typer.Argument(metavar="FILE|ENDPOINT", help="A recording, or a publisher's PUB socket.")],
    replay: Replay = None,
    topic: Topic = "",
    count: Count = None,
    convention: Convention = "detect",
    num_blocks: Annotated[
        int | None,
        typer.Option("--num-blocks", metavar="N", help="Blocks of the pool, without the null block.", min=1),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="RULE", help="A rule that may be broken, such as parent. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a stream: numbers, parents, removals, counts of tokens and hashes, groups, tiers, copies.

    Names the first event that broke a rule and explains it, then the first of every other rule. A live stream is
    checked until Ctrl-C, or --count batches.

    Exit code: 0 clean, 1 a rule was broken, 2 nothing to check.

    Example: blockpool events check events.jsonl --num-blocks 4096
    """
    from blockpool.wire.check import RULES, StreamCheck, StreamFault

    allowed = set(allow or ())
    if not allowed <= set(RULES):
        fail(f"--allow: no rule {', '.join(sorted(allowed - set(RULES)))}; there are {', '.join(RULES)}")
    with input_errors(ValueError):
        checked = StreamCheck(convention, num_blocks)
    faults: list[StreamFault] = []
    for seq, batch, payload, place in _batches(source, replay, topic, count):
        if seq < 0:
            found = [StreamFault("frames", checked.next_seq, None, f"a message of {len(payload)} bytes is none")]
        else:
            found = checked.feed(seq, batch, payload, place)
        faults += [fault for fault in found if fault.rule not in allowed]
    if checked.num_batches == 0 and not faults:
        fail(f"{source}: no batches")
    _report(checked, faults, as_json)
    if faults:
        raise typer.Exit(FAULTS_FOUND)


@events.command(short_help="Compare the index that a stream says with a pool's dump.")
def diff(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A recording, from the pool's first event on.")],
    dump: Annotated[
        str, typer.Argument(metavar="DUMP", help='The pool\'s dump() as JSON, or {"pools": [...]}; - is stdin.')
    ],
    convention: Convention = "detect",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the index that a stream says with the one that a pool has: keys by group and tier.

    Exit code: 0 the same, 1 different, 2 no recording (nor an empty one) or no dump.

    Example: blockpool events diff events.jsonl dump.json
    """
    import msgspec

    from blockpool.inspect import DumpFileError, load_dumps
    from blockpool.pool import DumpError
    from blockpool.wire import BatchError
    from blockpool.wire.check import StreamCheck
    from blockpool.wire.diff import compare_with_dumps

    with input_errors(ValueError):
        followed = StreamCheck(convention)
    for seq, batch, payload, place in _batches(file, None, "", None):
        if isinstance(batch, BatchError):
            fail(f"{place}: {batch}")
        followed.feed(seq, batch, payload, place)
    if followed.num_batches == 0:
        fail(f"{file}: no batches")
    with unless_interrupted(), input_errors(DumpFileError, DumpError):
        found = compare_with_dumps(followed.keys, load_dumps(dump), followed.convention == "per_copy")
    if as_json:
        document = {"format": "blockpool.events-diff/1", "same": not found, "differences": found}
        typer.echo(msgspec.json.format(msgspec.json.encode(document)))
    else:
        for one in found[:SHOWN_DIFFERENCES]:
            typer.echo(
                f"group {one.group}, {_shown(one.tier)}: {one.block_hash[:32]} {one.in_events} times in the events,"
                f" {one.in_dump} in the dump"
            )
        if len(found) > SHOWN_DIFFERENCES:
            typer.echo(f"and {len(found) - SHOWN_DIFFERENCES:,} more (--json lists them)")
        same = f"the same: {len(+followed.keys):,} keys"
        typer.echo(f"{len(found):,} differences" if found else same)
    if found:
        raise typer.Exit(FAULTS_FOUND)


# -- where batches come from -----------------------------------------------------------------------------


def _follow(endpoint: str, replay: str | None, topic: str, count: int | None) -> Iterator[tuple[int, bytes]]:
    """The batches of a live stream in their order, and on stderr what is known of it.

    One that came twice is given twice, in its place; what is no message has -1 for its number.
    """
    from blockpool.wire import Mirror, Subscriber, WireError

    _check_topic(topic)
    ready: list[tuple[int, bytes]] = []
    twice: dict[int, list[tuple[int, bytes]]] = {}

    def once(seq: int, payload: bytes) -> None:
        ready.append((seq, payload))
        ready.extend(twice.pop(seq, ()))

    def again(rule: str, seq: int, payload: bytes) -> None:
        if seq <= mirror.sequence:
            ready.append((seq, payload))
        else:  # the first one waits for what is missing
            twice.setdefault(seq, []).append((seq, payload))

    mirror = Mirror(on_batch=once)
    status, given = "", 0
    with (
        unless_interrupted(),
        input_errors(WireError),
        Subscriber(mirror, endpoint, replay, topic=topic, on_fault=again) as reader,
    ):
        while count is None or given < count:
            reader.poll(LOOK_S)
            for batch in ready[: None if count is None else count - given]:
                given += 1
                yield batch
            ready.clear()
            if status != f"{mirror.status}":
                status = f"{mirror.status}"
                typer.echo(f"{status} {mirror.reason}".strip(), err=True)


def _check_topic(topic: str) -> None:
    try:
        topic.encode()
    except UnicodeEncodeError:
        fail(f"--topic: {topic!r} is not UTF-8")


def _batches(
    source: str, replay: str | None, topic: str, count: int | None
) -> Iterator[tuple[int, "KVEventBatch | BatchError", bytes, str]]:
    """The batches of a file or an endpoint, as `StreamCheck.feed` takes them."""
    from blockpool.wire import WireError
    from blockpool.wire.recording import read_batch, read_recording

    if "://" in source:
        try:
            for seq, payload in _follow(source, replay, topic, count):
                yield seq, read_batch(payload), payload, ""
        except typer.Exit as end:
            if end.exit_code != 130:  # who interrupts a live check wants to see what it found
                raise
        return
    with unless_interrupted(), input_errors(WireError):
        for number, one in enumerate(read_recording(source)):
            if count is not None and number >= count:
                return
            yield one.seq, one.batch, one.payload, one.place


# -- what is shown ---------------------------------------------------------------------------------------


def _print_batch(seq: int, payload: bytes, as_json: bool) -> None:
    from blockpool.wire import BatchError
    from blockpool.wire.recording import read_batch, record_line

    if seq < 0:
        typer.echo("a message that is no batch", err=True)
        return
    if as_json:
        typer.echo(record_line(seq, payload).decode().rstrip())
        return
    batch = read_batch(payload)
    if isinstance(batch, BatchError):
        typer.echo(f"{seq:>8} cannot be decoded: {_shown(str(batch))}")
        return
    rank = "" if batch.data_parallel_rank is None else f" rank {batch.data_parallel_rank}"
    for event in batch.events:
        typer.echo(f"{seq:>8}{rank} {_line(event)}")


def _line(event: "KVCacheEvent") -> str:
    from blockpool.pool import AllBlocksCleared, BlockStored

    if isinstance(event, AllBlocksCleared):
        return f"cleared  {_shown(event.medium or 'every tier')}"
    place = f"{_shown(event.medium or '-')} group {event.group_idx or 0}"
    blocks = " ".join(_hash(one) for one in event.block_hashes[:3])
    more = len(event.block_hashes) - 3
    blocks += f" and {more:,} more" if more > 0 else ""
    if not isinstance(event, BlockStored):
        return f"removed  {place}  {blocks}"
    parent = "the start" if event.parent_block_hash is None else _hash(event.parent_block_hash)
    extras = [event.kv_cache_spec_kind, event.lora_name and f"lora {event.lora_name}"]
    about = "".join(f", {_shown(extra)}" for extra in extras if extra)
    return f"stored   {place}  {blocks} after {parent} ({len(event.token_ids):,} tokens{about})"


def _shown(text: str) -> str:
    """What others have written, without what a terminal would obey."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _hash(one: bytes | int) -> str:
    return one.hex()[:SHOWN_HASH_DIGITS] if isinstance(one, bytes) else str(one)


def _report(checked: "StreamCheck", faults: "list[StreamFault]", as_json: bool) -> None:
    import msgspec

    from blockpool.wire.check import first_of_each

    if as_json:
        document = {
            "format": "blockpool.events-check/1",
            "clean": not faults,
            "batches": checked.num_batches,
            "events": checked.num_events,
            "keys": len(+checked.keys),
            "convention": checked.convention,
            "faults": [msgspec.structs.asdict(fault) | {"why": fault.why} for fault in faults],
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(document)))
        return
    typer.echo(
        f"{checked.num_batches:,} batches, {checked.num_events:,} events, {len(+checked.keys):,} keys at the end"
    )
    for fault, times in first_of_each(faults):
        where = f"batch {fault.seq}" + ("" if fault.event is None else f", event {fault.event}")
        place = f" ({fault.place})" if fault.place else ""
        typer.echo(f"FAULT {fault.rule}: {where}{place}: {_shown(fault.detail)}")
        typer.echo(f"  {fault.why}")
        if times > 1:
            typer.echo(f"  and {times - 1:,} more of the kind")
    if not faults:
        typer.echo("clean: every rule is kept")
