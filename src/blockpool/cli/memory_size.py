"""Memory sizes as people write them."""

import re

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_memory(text: str) -> int:
    """Bytes in "40GiB" (binary), "40GB" (decimal), "1.5 TiB" or "1048576"; the case of the unit does not matter.

    Raises ValueError.
    """
    match = re.fullmatch(r"\s*([0-9]+)(?:\.([0-9]+))?\s*([A-Za-z]*)\s*", text)
    factor = _UNITS.get(match[3].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a memory size such as 40GiB, 40GB or 1048576")
    whole, decimals = match[1], match[2] or ""
    # In integers: a float would be off by whole blocks at large sizes.
    scaled: int = int(whole + decimals) * factor // 10 ** len(decimals)
    return scaled
