"""Lower tiers: pages of blocks in host memory, on disk and in a shared store, and the transfers between them.

They keep bytes under digests; they know no scheduler but the one connector, and nothing of what the bytes mean.
"""
