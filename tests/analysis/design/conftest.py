import pytest


@pytest.fixture
def desk(tmp_path, monkeypatch, request):
    """An empty folder to work in, where cells are those of a module that imitates lit_klrb."""
    monkeypatch.chdir(tmp_path)
    jobs = request.config.rootpath / "tests" / "analysis" / "sweep"
    monkeypatch.setenv("PYTHONPATH", str(jobs), prepend=":")
    monkeypatch.syspath_prepend(jobs)
    return tmp_path
