import pytest


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"line {i} of the corpus\n" for i in range(800)))
    return path
