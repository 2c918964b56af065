"""Bytes of one layer's state, on one rank: the last inputs of a short convolution, and the recurrent part."""

from __future__ import annotations

from .rank import Rank


def mamba1_state_bytes(rank: Rank, *, num_channels: int, state_size: int, conv_kernel: int) -> int:
    """Mamba: each channel has `state_size` numbers."""
    channels = rank.share("mamba channels", num_channels)
    return rank.state_bytes(channels * (conv_kernel - 1), channels * state_size)


def mamba2_state_bytes(
    rank: Rank,
    *,
    num_heads: int,
    head_dim: int,
    state_size: int,
    num_groups: int,
    conv_kernel: int,
    ssm_dtype: str | None,
) -> int:
    """Mamba 2: each head has `head_dim` * `state_size` numbers; groups of heads share the other inputs."""
    heads = rank.share("mamba_num_heads", num_heads)
    groups = rank.share_or_copy("n_groups", num_groups)
    convolved = heads * head_dim + 2 * groups * state_size
    return rank.state_bytes(convolved * (conv_kernel - 1), heads * head_dim * state_size, ssm_dtype)


def delta_net_state_bytes(
    rank: Rank,
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    conv_kernel: int,
) -> int:
    """Gated delta net: each value head has a matrix of `key_head_dim` * `value_head_dim` numbers."""
    key_heads = rank.share("linear_num_key_heads", num_key_heads)
    value_heads = rank.share("linear_num_value_heads", num_value_heads)
    convolved = 2 * key_heads * key_head_dim + value_heads * value_head_dim
    return rank.state_bytes(convolved * (conv_kernel - 1), value_heads * key_head_dim * value_head_dim)
