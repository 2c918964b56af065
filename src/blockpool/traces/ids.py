"""What may stand in a trace: lengths and prefix ids, with their limits."""

from typing import Annotated

import msgspec

from .errors import TraceError
from .trace import MAX_TOKENS

PromptLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
OutputLength = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
UnitLength = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
PrefixId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def check_num_ids(num_ids: int, num_prompt_tokens: int, unit: int, place: str, field: str) -> None:
    """There may be fewer ids than the prompt has units (the rest is unknown), but not more.

    Raises `TraceError`.
    """
    most = -(-num_prompt_tokens // unit)
    if num_ids > most:
        raise TraceError(
            f"{place}: {field}: {num_ids} ids, but {num_prompt_tokens} tokens have only {most} units of {unit}"
        )
