import pytest


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """Nothing is written outside of the test's folder."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setenv("BLOCKOPT_CACHE", str(tmp_path / "cache"))
