"""Kernels are interpreted and their portable forms run on a few small arrays."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick(quick_compilation: None) -> None:
    """For all tests of this folder."""
