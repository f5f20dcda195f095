"""What several files of this folder need."""

import pytest
import torch


@pytest.fixture
def nothing_compiled():
    """Grammar libraries compile how they apply a mask, which takes long."""
    with torch.compiler.set_stance("force_eager"):
        yield
