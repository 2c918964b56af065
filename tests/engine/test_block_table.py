"""Tables and slots as kernels read them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from blockpool.engine import BlockTable, StoreError, ring_slots, slot_mapping, slots_of


def test_a_row_grows_by_appending_and_the_table_in_both_directions() -> None:
    table = BlockTable(num_rows=1, num_positions=2)
    table.append(0, [5])
    table.append(0, [6, 0, 7])
    table.append(3, [9])
    assert table.ids.dtype == np.int32
    assert table.row(0).tolist() == [5, 6, 0, 7]
    assert table.row(1).tolist() == table.row(2).tolist() == []
    assert table.row(3).tolist() == [9]
    assert (table.ids[3, 1:] == 0).all()


def test_a_position_becomes_null_and_nothing_else_changes() -> None:
    table = BlockTable()
    table.append(0, [5, 6, 7])
    table.set_null(0, [0, 2])
    assert table.row(0).tolist() == [0, 6, 0]
    with pytest.raises(IndexError, match="row 0 has 3 positions, 3 is none of them"):
        table.set_null(0, [1, 3])
    assert table.row(0).tolist() == [0, 6, 0]


def test_rows_move_as_a_whole() -> None:
    table = BlockTable()
    table.append(0, [1, 2, 3])
    table.append(1, [4])
    table.move(1, 0)
    assert table.row(0).tolist() == [4]
    assert (table.ids[0, 1:] == 0).all()
    assert table.row(1).tolist() == []
    table.move(0, 0)
    assert table.row(0).tolist() == [4]


def test_random_operations_do_what_lists_do() -> None:
    c = random.Random(1)
    table = BlockTable(1, 1)
    rows: list[list[int]] = [[]]
    for _ in range(2000):
        row = c.randrange(len(rows) + 1)
        if row == len(rows):
            rows.append([])
        operation = c.randrange(5)
        if operation < 3:
            blocks = [c.randrange(2**31) for _ in range(c.randrange(4))]
            table.append(row, blocks)
            rows[row] += blocks
        elif operation == 3 and rows[row]:
            at = c.randrange(len(rows[row]))
            table.set_null(row, [at])
            rows[row][at] = 0
        elif operation == 4 and table.ids.shape[0] >= len(rows):
            to = c.randrange(len(rows))
            table.move(row, to)
            if to != row:
                rows[to], rows[row] = rows[row], []
        for at, expected in enumerate(rows):
            if at < len(table.lengths):
                assert table.row(at).tolist() == expected


def test_slots_of_tokens() -> None:
    row = np.array([7, 0, 3], np.int32)
    slots = slot_mapping(row, 4, 2, 10)
    assert slots.dtype == np.int64
    assert slots.tolist() == [30, 31, 0, 1, 2, 3, 12, 13]
    assert slots_of(row, 4, np.array([9, 0])).tolist() == [13, 28]
    assert slot_mapping(row, 4, 5, 5).tolist() == []
    assert ring_slots(row, 4, np.array([2, 3, 4, 9])).tolist() == [30, 31, 28, 29]


def test_slots_do_not_overflow_32_bits() -> None:
    row = np.array([2**31 - 1], np.int32)
    assert slot_mapping(row, 1 << 20, 0, 1).tolist() == [(2**31 - 1) << 20]
    assert ring_slots(row, 1 << 20, np.array([1])).tolist() == [((2**31 - 1) << 20) + 1]


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (0, 13), (12, 13)])
def test_tokens_that_a_table_does_not_reach(first: int, last: int) -> None:
    with pytest.raises(IndexError, match="in a table of 3 blocks of 4"):
        slot_mapping(np.array([1, 2, 3], np.int32), 4, first, last)


@pytest.mark.parametrize("tokens", [[-1], [3, -5], [0, 12], [12, 0], [5, -1, 3]])
def test_the_order_of_tokens_hides_none_that_is_out_of_the_table(tokens: list[int]) -> None:
    message = f"tokens {min(tokens)} to {max(tokens)} in a table of 3 blocks of 4"
    with pytest.raises(IndexError, match=message):
        slots_of(np.array([3, 0, 2**31 - 1], np.int32), 4, np.array(tokens))


def test_tokens_that_a_circular_buffer_does_not_have() -> None:
    with pytest.raises(IndexError, match="tokens -5 to 3 in a circular buffer: a table of 1 blocks"):
        ring_slots(np.array([7], np.int32), 4, np.array([3, -5]))
    with pytest.raises(IndexError, match="tokens 3 to 3 in a circular buffer: a table of 0 blocks"):
        ring_slots(np.zeros(0, np.int32), 4, np.array([3]))
    assert ring_slots(np.zeros(0, np.int32), 4, np.zeros(0, np.int64)).tolist() == []


@pytest.mark.parametrize("block", [-1, -3, 2**31])
def test_what_is_no_block_id(block: int) -> None:
    table = BlockTable(2, 2)
    table.append(0, [5])
    for row in (0, 1, 7):
        with pytest.raises(StoreError, match=f"row {row}: block {block} appended, where blocks are 0 to 2147483647"):
            table.append(row, [6, 7, 8, block])
    assert table.ids.tolist() == [[5, 0], [0, 0]]
    assert table.lengths.tolist() == [1, 0]
    table.append(0, [0, 2**31 - 1])
    assert table.row(0).tolist() == [5, 0, 2**31 - 1]


def test_rows_that_are_not_there() -> None:
    table = BlockTable(2, 2)
    table.append(0, [5])
    table.append(1, [6])
    with pytest.raises(StoreError, match="row -1: rows are counted from 0"):
        table.append(-1, [5])
    for row in (-1, 2):
        for call in (
            lambda row: table.set_null(row, [0]),
            lambda row: table.move(row, 0),
            lambda row: table.move(0, row),
            table.clear,
            table.row,
        ):
            with pytest.raises(StoreError, match=f"there is no row {row}, rows are 0 to 1"):
                call(row)
    assert table.ids.tolist() == [[5, 0], [6, 0]]
    assert table.lengths.tolist() == [1, 1]
