"""Bytes as people read them."""


def memory_text(num_bytes: int) -> str:
    """Bytes in a binary unit, two decimals."""
    unit, size = _unit_of(num_bytes)
    return f"{num_bytes / size:.2f}".rstrip("0").rstrip(".") + f" {unit}"


def enough_memory_text(num_bytes: int) -> str:
    """The same rounded up: who gives so much gives at least these bytes."""
    unit, size = _unit_of(num_bytes)
    whole, hundredths = divmod(-(-100 * num_bytes // size), 100)
    return f"{whole}.{hundredths:02}".rstrip("0").rstrip(".") + f" {unit}"


def _unit_of(num_bytes: int) -> tuple[str, int]:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return unit, size
    return "KiB", 2**10
