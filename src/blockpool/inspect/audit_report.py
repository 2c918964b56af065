"""The audit of every pool in a dump file."""

import msgspec

from blockpool.pool import DumpError, Fault, audit_dump

from .block_line import BlockLine, block_lines
from .dump_file import DumpFileError, file_name, load_dumps


class PoolAudit(msgspec.Struct, frozen=True):
    """One pool's books: what is wrong with them, and what they say of each block."""

    pool: int
    """The pool's number in the file."""
    medium: str
    num_gpu_blocks: int
    num_free_blocks: int
    faults: tuple[Fault, ...]
    blocks: tuple[BlockLine, ...]


def audit_file(path: str) -> list[PoolAudit]:
    """Audit every pool in the file ("-" is stdin). Raises `DumpFileError` when it is not a dump."""
    audits = []
    dumps = load_dumps(path)
    for number, dump in enumerate(dumps):
        try:
            faults = tuple(audit_dump(dump))
        except DumpError as error:
            where = f"pools[{number}]: " if len(dumps) > 1 else ""
            raise DumpFileError(f"{file_name(path)}: {where}{error}") from error
        audits.append(
            PoolAudit(
                pool=number,
                medium=dump.get("medium", "GPU"),
                num_gpu_blocks=dump["num_gpu_blocks"],
                num_free_blocks=dump["num_free_blocks"],
                faults=faults,
                blocks=block_lines(number, dump, faults),
            )
        )
    return audits
