"""The toolbox of the passes' tests."""

from tests.passes.conftest import tools_fixture  # noqa: F401
