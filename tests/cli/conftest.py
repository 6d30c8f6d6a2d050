"""What the tests of the command share."""

import pytest

from tests.helpers.hessian_command import TEXT


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)
