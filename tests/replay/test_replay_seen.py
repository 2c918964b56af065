"""The longest prefix that an earlier prompt had too, against looking through all of them."""

from hypothesis import given
from hypothesis import strategies as st

from blockpool.replay import DigestedTrace
from blockpool.replay.expand import DIGEST_BYTES
from blockpool.replay.seen import SeenPrefixes
from blockpool.traces import Trace
from tests.sizes import property_settings

from .trace_makers import id_traces, token_traces


def check(trace: Trace, hash_block_size: int) -> None:
    seen = SeenPrefixes(hash_block_size)
    earlier: list[list[bytes]] = []
    for request, chain in DigestedTrace(trace, hash_block_size):
        digests = [chain[at : at + DIGEST_BYTES] for at in range(0, len(chain), DIGEST_BYTES)]
        common = 0
        while any(digests[: common + 1] == other[: common + 1] for other in earlier) and common < len(digests):
            common += 1
        prompt = seen.look_up(request, chain)
        assert prompt.num_tokens == common * hash_block_size
        prompt.add()
        earlier.append(digests)


@property_settings(100)
@given(data=st.data(), unit=st.sampled_from([4, 8]), hash_block_size=st.sampled_from([1, 2, 4, 8]))
def test_prompts_known_by_ids(data: st.DataObject, unit: int, hash_block_size: int):
    check(data.draw(id_traces(unit)), hash_block_size)


@property_settings(60)
@given(trace=token_traces(), hash_block_size=st.sampled_from([1, 3, 4]))
def test_prompts_known_by_tokens(trace: Trace, hash_block_size: int):
    check(trace, hash_block_size)
