"""Tests of the engines; the assertions of the shared suite explain themselves like any other."""

import pytest

for module in ("contract", "driving", "moving", "serving", "storms"):
    pytest.register_assert_rewrite(f"tests.engines.{module}")
