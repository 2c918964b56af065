from __future__ import annotations

from collections.abc import Iterator

import pytest

from blockpool.hashing import kernel


@pytest.fixture(scope="module", params=kernel.KERNELS)
def kernel_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kernel by name, and as the one that runs; those that do not run here are skipped."""
    name: str = request.param
    if name not in kernel.available_kernels():
        pytest.skip(f"the {name} kernel was not built or does not run on this CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "KERNEL", name)
        yield name


@pytest.fixture(params=["sha256_cbor", "sha256", "xxhash_cbor", "xxhash"])
def algorithm(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name.startswith("xxhash"):
        pytest.importorskip("xxhash")
    return name
