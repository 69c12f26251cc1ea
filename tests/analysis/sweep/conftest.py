import os
import shutil

import pytest
from sweep_project import HERE, Project

from analysis.design import expand, read_plan


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    return Project(tmp_path)


@pytest.fixture
def cells(project):
    """The cells of the small plan: sft, dpo, and 2 estimators x 2 betas x 2 replicates."""
    return expand(read_plan(project.write())).cells


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The small plan, swept once for all tests."""
    finished = Project(tmp_path_factory.mktemp("finished"))
    finished.code, finished.output = finished.run("sweep", "--config", finished.write())
    return finished


@pytest.fixture
def swept(project, finished):
    """A copy of the finished project that a test may change; sweeps can be moved."""
    shutil.copytree(finished.directory, project.directory, dirs_exist_ok=True)
    project.write()
    return project
