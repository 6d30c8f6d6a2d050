import os

import pytest

# torch looks up a name for each end of each connection to a store, and the store serves nobody
# meanwhile: with a name server that is slow or gone, ranks would take minutes to meet.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """Nothing is written outside of the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("BLOCKOPT_CACHE", str(tmp_path / "cache"))
