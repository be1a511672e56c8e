"""What these tests share is imported from modules whose asserts are to show values too."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("refusals")
