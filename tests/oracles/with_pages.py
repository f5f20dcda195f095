"""Tests of caches whose memory the system deals out page by page: Linux does."""

import pytest

from stand.forward.cache import mapped_memory

needs_pages = pytest.mark.skipif(not mapped_memory.is_available(), reason="needs Linux")
